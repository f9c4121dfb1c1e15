"""The protocol's number and why it changed. A peer with another number is refused at the hello, by name. Pure.

1  2026-11  first: hello and dispatch in `kv_transfer_params`, write notes over the transport, fences over ZMQ
"""

PROTOCOL_VERSION = 1
