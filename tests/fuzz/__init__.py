"""Hostile input for every decoder of bytes and every public parameter. Run by `scripts/fuzz --minutes N`."""
