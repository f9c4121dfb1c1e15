"""The protocol's number and why it changed. A peer with another number is refused at the hello, by name. Pure.

1  2026-11  first: hello and dispatch in `kv_transfer_params`, write notes over the transport, fences over ZMQ
2  2026-11  unequal shapes: reservations carry the decoder's geometry and the blocks of each cache group; units are
            tokens of heads of layers; digests name the pieces they are of
"""

PROTOCOL_VERSION = 2
