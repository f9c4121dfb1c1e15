"""What must move: pages a chunk completes, the slices that carry them, how many a decoder must see. Pure."""
