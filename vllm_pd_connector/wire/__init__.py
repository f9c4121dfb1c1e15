"""What is said between engines: typed messages, their encoding, versions, and the compatibility report. Pure."""
