"""Bytes to messages and back: typed, size-capped, and the only place that decodes what a peer sent. Pure."""

from typing import Final

import msgspec

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.wire.messages import Control, Note

MAX_NOTE_BYTES: Final = 1 << 22
"""Large enough for the digests of 100,000 pages; an ordinary note is about 50 bytes."""

MAX_CONTROL_BYTES: Final = 1 << 13

_encoder = msgspec.msgpack.Encoder()
_note_decoder = msgspec.msgpack.Decoder(Note)
_control_decoder = msgspec.msgpack.Decoder(Control)


def encode(message: Note | Control) -> bytes:
    """msgpack bytes of a note or control message."""
    return _encoder.encode(message)


def decode_note(frame: bytes) -> Note:
    """A note from a prefiller rank.

    Raises:
        ProtocolError: too long or not a note; the frame alone is lost.
    """
    if len(frame) > MAX_NOTE_BYTES:
        raise ProtocolError(f"notification of {len(frame)} B; {MAX_NOTE_BYTES} B are allowed")
    try:
        return _note_decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"notification of {len(frame)} B: {error}") from None


def decode_control(frame: bytes) -> Control:
    """A control message.

    Raises:
        ProtocolError: too long or not a control message; the frame alone is lost.
    """
    if len(frame) > MAX_CONTROL_BYTES:
        raise ProtocolError(f"control frame of {len(frame)} B; {MAX_CONTROL_BYTES} B are allowed")
    try:
        return _control_decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"control frame of {len(frame)} B: {error}") from None
