"""Law 12 at the door: messages survive the wire, and any bytes give a message or a ProtocolError, nothing else."""

import math
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.wire.codec import MAX_CONTROL_BYTES, MAX_NOTE_BYTES, decode_control, decode_note, encode
from vllm_pd_connector.wire.compatibility import CacheShape
from vllm_pd_connector.wire.messages import (
    Control,
    ControlEndpoint,
    DecoderRank,
    DispatchReply,
    FailureNote,
    Fence,
    Hello,
    HelloReply,
    Inquiry,
    Note,
    Quiet,
    Refused,
    Reservation,
    Standing,
    WriteNote,
)
from vllm_pd_connector.wire.transfer_params import (
    HELLO,
    MAX_DEPTH,
    NOTHING,
    REPLY,
    RESERVATION,
    TransferParams,
    parse_params,
    parse_reply,
    to_params,
)
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

hex32 = st.text("0123456789abcdef", min_size=32, max_size=32)
hex16 = st.text("0123456789abcdef", min_size=16, max_size=16)
counts = st.integers(0, 2**31 - 1)
positives = st.integers(1, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)

notes: st.SearchStrategy[Note] = st.one_of(
    st.builds(
        WriteNote,
        transfer_id=hex32,
        sender=counts,
        seq=counts,
        units=positives,
        pages=positives,
        digests=st.binary(max_size=32),
        layers=st.lists(counts, max_size=3),
        blocks=st.lists(positives, max_size=3),
        spots=st.lists(counts, max_size=3),
        pieces=st.lists(st.lists(st.tuples(counts, positives), max_size=3), max_size=3),
    ),
    st.builds(FailureNote, transfer_id=hex32, sender=counts, reason=texts),
)
controls: st.SearchStrategy[Control] = st.one_of(
    st.builds(Fence, transfer_id=hex32, generation=hex16),
    st.builds(Quiet, transfer_id=hex32, units=counts),
    st.builds(Inquiry, transfer_id=hex32, generation=hex16),
    st.builds(Standing, transfer_id=hex32, is_over=st.booleans(), error=texts),
    st.builds(Refused, reason=texts, transfer_id=st.one_of(st.just(""), hex32)),
)
tables = st.builds(
    PageTable,
    base=st.integers(0, 2**63 - 1),
    size_bytes=st.integers(0, 2**62),
    device_id=st.integers(0, 7),
    memory=st.sampled_from(["DRAM", "VRAM"]),
    num_blocks=positives,
    page_bytes=positives,
    block_stride=positives,
    layer_offsets=st.lists(counts, max_size=3),
)
sizes = st.integers(1, 1024)
planes = st.lists(st.tuples(positives, positives), max_size=3).map(tuple)
layouts = st.sampled_from(["LBHNC", "LBNHC"])
geometries = st.builds(
    CacheGeometry,
    tp_size=sizes,
    num_kv_heads=positives,
    block_size=sizes,
    slot_bytes=positives,
    layout=layouts,
    planes=planes,
    kernel_blocks=positives,
)
cache_shapes = st.builds(
    CacheShape,
    **{f.name: texts if f.type is str else sizes for f in msgspec.structs.fields(CacheShape)}
    | {"planes": planes, "layout": layouts},
)
reservations = st.builds(
    Reservation,
    protocol=st.just(PROTOCOL_VERSION),
    transfer_id=hex32,
    decoder=texts,
    decoder_generation=hex16,
    prefiller_generation=hex16,
    local_tokens=counts,
    blocks=st.lists(st.lists(positives, max_size=4), min_size=1, max_size=3),
    lease_s=st.floats(0.001, 86_400),
    geometry=geometries,
    ranks=st.lists(st.builds(DecoderRank, descriptor=texts, pages=tables), min_size=1, max_size=2),
)
hellos = st.builds(Hello, protocol=st.just(PROTOCOL_VERSION), decoder=texts)
endpoints = st.builds(ControlEndpoint, endpoint=texts, generation=hex16)
hello_replies = st.builds(
    HelloReply,
    engine=texts,
    generation=hex16,
    shape=cache_shapes,
    controls=st.lists(endpoints, min_size=1, max_size=2),
)
replies = st.builds(DispatchReply, pages=counts, error=texts, hello=st.none() | hello_replies)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
OUR_KEYS = st.sampled_from(["prefiller", RESERVATION, HELLO, REPLY])


@given(notes)
def test_notes_survive_the_wire(note: Note) -> None:
    assert decode_note(encode(note)) == note


@given(controls)
def test_control_messages_survive_the_wire(message: Control) -> None:
    assert decode_control(encode(message)) == message


@given(reservations)
def test_reservations_survive_json(reservation: Reservation) -> None:
    params = msgspec.json.decode(msgspec.json.encode(to_params(RESERVATION, reservation)))
    assert parse_params(params) == TransferParams(reservation=reservation)


@given(hellos)
def test_hellos_survive_json(hello: Hello) -> None:
    params = msgspec.json.decode(msgspec.json.encode(to_params(HELLO, hello)))
    assert parse_params(params) == TransferParams(hello=hello)


@given(replies)
def test_replies_survive_json(reply: DispatchReply) -> None:
    assert parse_reply(msgspec.json.decode(msgspec.json.encode(to_params(REPLY, reply)))) == reply


@given(reservations)
def test_half_a_surrogate_pair_is_refused_like_any_other_wrong_word(reservation: Reservation) -> None:
    """JSON can say it, and where one of a few words is due msgspec raises another error than a validation error."""
    params = to_params(RESERVATION, reservation)
    params[RESERVATION]["ranks"][0]["pages"]["memory"] = "\ud800"
    with pytest.raises(ProtocolError):
        parse_params(params)


def decode_any(frame: bytes) -> None:
    for decode in (decode_note, decode_control):
        try:
            message = decode(frame)
        except ProtocolError:
            continue
        assert isinstance(message, WriteNote | FailureNote | Fence | Quiet | Refused | Inquiry | Standing)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(frame: bytes) -> None:
    decode_any(frame)


@given(st.one_of(notes, controls), st.integers(0, 10_000), st.binary(min_size=1, max_size=5), st.booleans())
def test_a_damaged_message_decodes_or_is_refused(message: Any, at: int, damage: bytes, cut: bool) -> None:
    frame = encode(message)
    at %= len(frame)
    decode_any(frame[:at] if cut else frame[:at] + damage + frame[at + len(damage) :])


@pytest.mark.parametrize("frame", [b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\x95\x01\xdb\xff\xff\xff\xff", b""])
def test_headers_that_promise_too_much_are_refused(frame: bytes) -> None:
    for decode in (decode_note, decode_control):
        with pytest.raises(ProtocolError):
            decode(frame)


def test_oversized_frames_are_refused_before_they_are_parsed() -> None:
    with pytest.raises(ProtocolError, match="allowed"):
        decode_note(bytes(MAX_NOTE_BYTES + 1))
    with pytest.raises(ProtocolError, match="allowed"):
        decode_control(bytes(MAX_CONTROL_BYTES + 1))


@given(st.dictionaries(OUR_KEYS | st.text(max_size=8), json_values, max_size=4))
def test_any_kv_transfer_params_parse_or_are_refused(params: dict[str, Any]) -> None:
    with suppress(ProtocolError):
        assert isinstance(parse_params(params), TransferParams)
    with suppress(ProtocolError):
        assert isinstance(parse_reply(params), DispatchReply)


@given(reservations, st.data())
def test_a_reservation_with_one_field_replaced_parses_or_is_refused(
    reservation: Reservation, data: st.DataObject
) -> None:
    params = to_params(RESERVATION, reservation)
    field = data.draw(st.sampled_from(sorted(params[RESERVATION])))
    params[RESERVATION][field] = data.draw(json_values)
    refusal = ""
    try:
        parsed = parse_params(params).reservation
        assert parsed is not None
        assert 0 < parsed.lease_s <= 86_400
    except ProtocolError as error:
        refusal = str(error)
    assert not refusal or RESERVATION in refusal or "nested" in refusal


@pytest.mark.parametrize("lease", [math.nan, math.inf, -1.0, 0, "5", None, 1e9])
def test_a_lease_that_is_no_duration_is_refused(lease: object) -> None:
    """NaN compares false with everything: in a heap of deadlines it would stop all leases behind it (law 8)."""
    params = {
        RESERVATION: {
            "protocol": PROTOCOL_VERSION,
            "transfer_id": "0" * 32,
            "decoder": "d",
            "decoder_generation": "0" * 16,
        }
    }
    params[RESERVATION] |= {"prefiller_generation": "0" * 16}
    params[RESERVATION] |= {"local_tokens": 0, "blocks": [[1]], "lease_s": lease}
    geometry = {"tp_size": 1, "num_kv_heads": 1, "block_size": 1, "slot_bytes": 8, "layout": "LBHNC"}
    params[RESERVATION] |= {"ranks": [{"descriptor": "", "pages": PAGES}], "geometry": geometry}
    with pytest.raises(ProtocolError, match="lease_s"):
        parse_params(params)


PAGES = {
    "base": 4096,
    "size_bytes": 100,
    "device_id": 0,
    "memory": "DRAM",
    "num_blocks": 2,
    "page_bytes": 8,
    "block_stride": 8,
    "layer_offsets": [0],
}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True, "remote_engine_id": "x"}])
def test_keys_of_other_connectors_are_ignored(params: dict[str, Any] | None) -> None:
    assert parse_params(params) == NOTHING


@given(st.integers(0, 60), st.booleans())
def test_nesting_is_refused_beyond_the_limit_and_only_there(depth: int, as_list: bool) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value] if as_list else {"k": value}
    params = {"other": value}
    if depth + 1 > MAX_DEPTH:
        with pytest.raises(ProtocolError, match="nested"):
            parse_params(params)
    else:
        assert parse_params(params) == NOTHING


@pytest.mark.parametrize("params", ["boom", 7, 1.5, True, ["prefiller"], b"x"])
def test_parameters_that_are_no_object_are_refused(params: object) -> None:
    """vLLM passes `vllm_xargs: {"kv_transfer_params": "boom"}` on as it is."""
    with pytest.raises(ProtocolError, match="must be an object"):
        parse_params(params)
