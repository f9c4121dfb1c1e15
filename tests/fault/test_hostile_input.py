"""Nothing a client or a stranger sends stops a server; each bad message is followed by a right request (law 12)."""

import json
import random
import re
import secrets
import socket
import struct
import urllib.error
import urllib.request
from typing import Any

import pytest
import zmq
from server_tier.ask import Score, ask, body_of, fresh_salt, post
from server_tier.fixtures import Pair
from server_tier.probe import Since, wait_quiet
from server_tier.prompts import RANDOM, names
from server_tier.reference import Reference

from vllm_pd_connector.testing.servers import Server
from vllm_pd_connector.wire.codec import decode_control, encode
from vllm_pd_connector.wire.messages import Fence, Quiet
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

SMALL = names("small")[2]
HEX32, HEX16 = "a" * 32, "b" * 16
PAGES = {
    "base": 4096,
    "size_bytes": 8 * 1000 * 32768,
    "device_id": 0,
    "memory": "DRAM",
    "num_blocks": 1000,
    "page_bytes": 32768,
    "block_stride": 32768,
    "layer_offsets": [layer * 1000 * 32768 for layer in range(8)],
}

GEOMETRY = {
    "tp_size": 1,
    "num_kv_heads": 4,
    "block_size": 32,
    "slot_bytes": 256,
    "layout": "LBHNC",
    "planes": [[32, 4], [1, 128]],
    "kernel_blocks": 1,
}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"x": value}
    return value


CLIENT_PARAMS: dict[str, Any] = {
    "null": None,
    "empty": {},
    "a string": "prefiller",
    "a list": [1, 2, 3],
    "a number": 7,
    "unknown prefiller": {"prefiller": "http://evil.example:1"},
    "prefiller of wrong type": {"prefiller": 5},
    "prefiller is a list": {"prefiller": ["http://127.0.0.1:1"]},
    "prefiller is null": {"prefiller": None},
    "another connector's": {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "x"},
    "nested a little": {"prefiller": nested(40)},
    "a long string": {"prefiller": "http://" + "a" * 1_000_000},
    "huge list": {"remote_block_ids": list(range(300_000))},
    "reservation is null": {"pd_reservation": None},
    "reservation is a list": {"pd_reservation": [1] * 1000},
    "hello is a number": {"pd_hello": 1e308},
    "hello without a name": {"pd_hello": {"protocol": PROTOCOL_VERSION}},
    "hello of another protocol": {"pd_hello": {"protocol": 999, "decoder": "x"}},
    "hello with a huge name": {"pd_hello": {"protocol": PROTOCOL_VERSION, "decoder": "x" * 100_000}},
    "reply from a client": {"pd_reply": {"pages": 10**30}},
}
RESERVATIONS: dict[str, dict[str, Any]] = {
    "another protocol": {"protocol": 0},
    "protocol of wrong type": {"protocol": "1"},
    "id with a path": {"transfer_id": "../../etc/passwd"},
    "another process": {"prefiller_generation": HEX16},
    "no groups": {"blocks": []},
    "no blocks": {"blocks": [[]]},
    "blocks of two groups": {"blocks": [list(range(1, 11)), [11]]},
    "blocks without a group": {"blocks": list(range(1, 11))},
    "block zero": {"blocks": [[0] * 10]},
    "negative block": {"blocks": [[-1] * 10]},
    "block outside the region": {"blocks": [[*range(1, 10), 1000]]},
    "huge block": {"blocks": [[*range(1, 10), 2**31 - 1]]},
    "huge number": {"blocks": [[*range(1, 10), 10**300]]},
    "one block twice": {"blocks": [[1] * 10]},
    "too many blocks": {"blocks": [list(range(1, 999))]},
    "too few blocks": {"blocks": [[1, 2]]},
    "half a million blocks": {"blocks": [list(range(1, 500_000))]},
    "local tokens far away": {"local_tokens": 2**31 - 1},
    "negative local tokens": {"local_tokens": -32},
    "geometry of wrong type": {"geometry": "HND"},
    "no tokens in a block": {"geometry": {**GEOMETRY, "block_size": 0}},
    "a block of other tokens": {"geometry": {**GEOMETRY, "block_size": 33}},
    "endless blocks": {"geometry": {**GEOMETRY, "block_size": 2**62}},
    "more ranks than heads divide": {"geometry": {**GEOMETRY, "tp_size": 3}},
    "ranks that are not named": {"geometry": {**GEOMETRY, "tp_size": 2}},
    "other heads": {"geometry": {**GEOMETRY, "num_kv_heads": 8}},
    "other slots": {"geometry": {**GEOMETRY, "slot_bytes": 8}},
    "other planes": {"geometry": {**GEOMETRY, "planes": [[1, 256]]}},
    "a layout of its own": {"geometry": {**GEOMETRY, "layout": "BLHNC"}},
    "no ranks": {"ranks": []},
    "too many ranks": {"ranks": [{"descriptor": "", "pages": PAGES}] * 3},
    "endless lease": {"lease_s": 1e300},
    "negative lease": {"lease_s": -1},
    "descriptor is no base64": {"ranks": [{"descriptor": "!" * 99, "pages": PAGES}]},
    "descriptor is garbage": {"ranks": [{"descriptor": "AAECAwQF" * 20, "pages": PAGES}]},
    "pages overlap": {"ranks": [{"descriptor": "AAEC", "pages": {**PAGES, "block_stride": 1}}]},
    "pages outside": {"ranks": [{"descriptor": "AAEC", "pages": {**PAGES, "size_bytes": 1}}]},
    "no layers": {"ranks": [{"descriptor": "AAEC", "pages": {**PAGES, "layer_offsets": []}}]},
    "pages of wrong type": {"ranks": [{"descriptor": "AAEC", "pages": "all"}]},
    "page size differs": {"ranks": [{"descriptor": "AAEC", "pages": {**PAGES, "page_bytes": 16, "block_stride": 16}}]},
    "memory of an unknown kind": {"ranks": [{"descriptor": "AAEC", "pages": {**PAGES, "memory": "TAPE"}}]},
}


def check_next(pair: Pair, reference: Reference, score: Score) -> None:
    """The next request is prefilled remotely and answered rightly."""
    since = Since(pair.decoder)
    score.compare(SMALL, ask(pair.decoder.url, RANDOM[SMALL], cache_salt=fresh_salt()), reference.answers[SMALL])
    assert since("dispatched", "released") == [1, 1]


@pytest.mark.parametrize("kind", CLIENT_PARAMS)
def test_params_of_a_client(main_pair: Pair, random_reference: Reference, score: Score, kind: str) -> None:
    """Refused clearly, or ignored: then the answer is right."""
    for server in (main_pair.decoder, main_pair.prefiller):
        body = body_of(RANDOM[SMALL], kv_transfer_params=CLIENT_PARAMS[kind], cache_salt=fresh_salt())
        status, answer = post(server.url, body, timeout_s=60)
        assert status in (200, 400, 422, 500), answer
    check_next(main_pair, random_reference, score)
    score.check()


@pytest.mark.parametrize("value", ["a string", 7, [1, "x"]], ids=str)
def test_params_by_way_of_extra_arguments(
    main_pair: Pair, random_reference: Reference, score: Score, value: object
) -> None:
    """`vllm_xargs` passes values of other kinds on, which would end vLLM's scheduler."""
    for server in (main_pair.decoder, main_pair.prefiller):
        body = body_of(RANDOM[SMALL], vllm_xargs={"kv_transfer_params": value}, cache_salt=fresh_salt())
        status, answer = post(server.url, body, timeout_s=60)
        assert status != 200, answer
    check_next(main_pair, random_reference, score)
    score.check()


@pytest.mark.parametrize("kind", RESERVATIONS)
def test_reservations_of_a_stranger(main_pair: Pair, random_reference: Reference, score: Score, kind: str) -> None:
    """All of it is right but for one thing. The prefiller says or logs why it will not, writes nothing and goes on."""
    prompt = RANDOM[SMALL]
    written = Since(main_pair.prefiller)
    reservation = {
        "protocol": PROTOCOL_VERSION,
        "transfer_id": secrets.token_hex(16),
        "decoder": "stranger",
        "decoder_generation": HEX16,
        "prefiller_generation": _generation(main_pair.prefiller),
        "local_tokens": 0,
        "blocks": [list(range(1, 11))],
        "lease_s": 5.0,
        "geometry": GEOMETRY,
        "ranks": [{"descriptor": "AAEC", "pages": PAGES}],
        **RESERVATIONS[kind],
    }
    assert -(-len(prompt) // 32) == 10
    body = body_of(prompt, kv_transfer_params={"pd_reservation": reservation}, cache_salt=fresh_salt(), max_tokens=1)
    status, answer = post(main_pair.prefiller.url, body, timeout_s=60)
    if status == 200 and not answer["kv_transfer_params"]["pd_reply"]["error"]:
        main_pair.prefiller.wait_log(f"event=transfer_failed transfer={reservation['transfer_id']}", 10)
    assert status in (200, 400, 422, 500), answer
    wait_quiet(main_pair.prefiller)
    assert written("pages_written") == [0]
    check_next(main_pair, random_reference, score)
    score.check()


def test_garbage_on_the_control_port(main_pair: Pair, random_reference: Reference, score: Score) -> None:
    """From plain sockets, from ZMQ sockets, and well-formed messages that no decoder would send."""
    host, port = _control(main_pair.prefiller)
    chance = random.Random(20)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(70_000), b"\xff" + struct.pack(">Q", 1 << 60)):
        with socket.create_connection((host, port), timeout=5) as stranger:
            stranger.sendall(garbage)
    context = zmq.Context()
    try:
        for frames in (
            [b""],
            [chance.randbytes(100)],
            [chance.randbytes(1 << 16)],
            [b"\x91" * 5000],
            [encode(Quiet(HEX32, 1))],
            [encode(Fence(HEX32, HEX16))],
            [b"a", b"b", b"c"],
        ):
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.connect(f"tcp://{host}:{port}")
            dealer.send_multipart(frames)
            if len(frames[0]) < 8000 and dealer.poll(5000):
                assert type(decode_control(dealer.recv())).__name__ == "Refused"
            dealer.close()
    finally:
        context.destroy(linger=0)
    check_next(main_pair, random_reference, score)
    # A fence is still taken and answered: a client that leaves has its pages back at once.
    from_others = Since(main_pair.decoder)
    body = json.dumps(body_of(RANDOM[names("long")[0]], cache_salt=fresh_salt())).encode()
    with socket.create_connection(("127.0.0.1", main_pair.decoder.port), timeout=5) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        from_others.until("dispatched", 1)
    wait_quiet(main_pair.decoder, main_pair.prefiller)
    assert from_others("fences_lifted", "fences_expired") == [1, 0]
    score.check()


@pytest.mark.parametrize("depth", [20, 100, 450, 100_000])
def test_the_guard_refuses_deep_nesting(smollm_pair: Pair, depth: int) -> None:
    """450 levels kill the engine of a stock vLLM 0.32."""
    text = '{"prompt": [1], "max_tokens": 1, "kv_transfer_params": ' + '{"x":' * depth + "1" + "}" * depth + "}"
    for server in (smollm_pair.decoder, smollm_pair.prefiller):
        request = urllib.request.Request(
            f"{server.url}/v1/completions", text.encode(), {"content-type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == 400
        assert b"nested" in refused.value.read()
        assert post(server.url, body_of([5, 6], max_tokens=1))[0] == 200


def _generation(prefiller: Server) -> str:
    hello = {"pd_hello": {"protocol": PROTOCOL_VERSION, "decoder": "stranger"}}
    status, answer = post(prefiller.url, body_of([1], max_tokens=1, kv_transfer_params=hello))
    assert status == 200, answer
    generation: str = answer["kv_transfer_params"]["pd_reply"]["hello"]["generation"]
    return generation


def _control(prefiller: Server) -> tuple[str, int]:
    found = re.search(r"event=pages_registered .*control=tcp://([\d.]+):(\d+)", prefiller.log_text())
    assert found is not None
    return found[1], int(found[2])
