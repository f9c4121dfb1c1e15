"""Who carries messages: HTTP dispatch to prefillers, and fences over ZMQ (CURVE when a key is configured)."""
