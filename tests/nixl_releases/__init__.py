"""The transport on releases of NIXL other than the installed one. Run by `scripts/nixl-releases`."""
