"""Faults against real servers, one after another, with the same checks after each. Run by `scripts/faults`."""
