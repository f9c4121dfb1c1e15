"""Every error this package raises, split by who can act on it.

PDConnectorError
├── ConfigError            the operator, at start: a key, its value, what is allowed
├── UnsupportedEngine      the operator, at start: vLLM version, cache layout or model this release cannot serve
├── ProtocolError          whoever sent the message: it is malformed, oversized or of another version
│   ├── OtherProtocol      the operator of both sides: one of them runs another release
│   └── IncompatiblePeer   the operator of both sides: the fields in which the two servers differ
├── TransferError          nobody has to act; the request is retried or prefilled locally
│   └── PeerLost           a prefiller or decoder is gone
├── OutOfRegion            the peer that named pages outside the registered memory
└── InvariantBroken        us: a bug; the message says which law
"""


class PDConnectorError(Exception):
    """Root of the tree."""


class ConfigError(PDConnectorError):
    """A configuration key is unknown, missing or out of range. Raised at start only."""


class UnsupportedEngine(PDConnectorError):
    """The vLLM this runs in cannot be served: version, KV layout, or cache groups. Raised at start only."""


class ProtocolError(PDConnectorError):
    """A peer or client said something that cannot be understood; that message alone is refused."""


class OtherProtocol(ProtocolError):
    """A peer speaks another version of the protocol; it is answered, so that its operator learns why."""


class IncompatiblePeer(ProtocolError):
    """Two servers differ in fields that must match.

    Args:
        peer: base URL or engine id of the other side.
        differences: (field, local value, remote value), one for each differing field.
    """

    def __init__(self, peer: str, differences: list[tuple[str, str, str]]) -> None:
        self.peer = peer
        self.differences = differences
        fields = "; ".join(f"{name}: here {local}, there {remote}" for name, local, remote in differences)
        super().__init__(f"{peer} cannot exchange KV pages with this server: {fields}. Start both with equal values.")


class TransferError(PDConnectorError):
    """One request's pages did not all arrive. The request itself is not lost."""


class PeerLost(TransferError):
    """The other engine died or cannot be reached."""


class OutOfRegion(PDConnectorError):
    """A page or byte range lies outside the memory that was registered for it."""


class InvariantBroken(PDConnectorError):
    """Our own bug: a law of ARCHITECTURE.md does not hold."""
