"""Where bytes live: page layouts, registered regions, head ownership. Pure."""
