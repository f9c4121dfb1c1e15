"""Who carries bytes: one small protocol, carried by NIXL, by memory copies, or by either behind scripted faults."""
