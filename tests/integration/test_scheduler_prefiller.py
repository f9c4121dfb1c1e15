"""The prefiller's scheduler half inside a real vLLM scheduler: what each step sends, what is refused, what is kept."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from scheduler_rig import BLOCK, LAYERS, SHAPE, MakeRig, Rig, Step, handshake
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.wire.compatibility import differences
from vllm_pd_connector.wire.messages import DecoderRank, DispatchReply, Hello, HelloReply, Reservation
from vllm_pd_connector.wire.transfer_params import HELLO, RESERVATION, parse_reply, to_params
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

PROMPT = 6 * BLOCK + 4
PAGES = 7
TRANSFER = "0123456789abcdef" * 2


@pytest.fixture
def role() -> str:
    return "kv_producer"


def reply_of(rig: Rig, request: Request) -> DispatchReply:
    (last,) = [o for o in rig.outputs if o.request_id == request.request_id and o.finish_reason is not None]
    assert last.finish_reason is FinishReason.LENGTH
    reply = parse_reply(last.kv_transfer_params)
    assert reply.clock is not None
    return msgspec.structs.replace(reply, clock=None)


def greet(rig: Rig) -> HelloReply:
    """What a decoder learns before it dispatches."""
    hello = rig.add(1, params=to_params(HELLO, Hello(protocol=PROTOCOL_VERSION, decoder="d")), max_tokens=1)
    rig.run_until_done()
    reply = reply_of(rig, hello)
    assert reply.hello is not None
    return reply.hello


def reservation(rig: Rig, *, first_page: int = 0, **changes: Any) -> Reservation:
    plain = Reservation(
        protocol=PROTOCOL_VERSION,
        transfer_id=TRANSFER,
        decoder="d",
        decoder_generation="d" * 16,
        prefiller_generation=greet(rig).generation,
        local_tokens=first_page * BLOCK,
        blocks=[[50 - i for i in range(PAGES - first_page)]],
        lease_s=60.0,
        geometry=SHAPE.geometry(),
        ranks=[DecoderRank(descriptor="cmFuayAw", pages=handshake().pages)],
    )
    return msgspec.structs.replace(plain, **changes)


def dispatch(rig: Rig, wanted: Reservation, num_tokens: int = PROMPT, **kwargs: Any) -> Request:
    return rig.add(num_tokens, params=to_params(RESERVATION, wanted), max_tokens=1, **kwargs)


def sent(step: Step) -> list[tuple[int, int]]:
    """(source block, destination block) of every page of a step."""
    groups = [group for write in step.orders.writes for group in write.groups]
    return [pair for group in groups for pair in zip(group.src_blocks, group.dst_blocks, strict=True)]


def test_a_greeting_is_answered_in_one_token_with_shape_and_controls(rig: Rig) -> None:
    before = rig.free_blocks
    hello = greet(rig)
    assert hello.engine == "kv_producer"
    assert hello.shape == handshake().shape
    assert [c.endpoint for c in hello.controls] == ["tcp://127.0.0.1:1"]
    assert rig.free_blocks == before


def test_stages_are_greeted_as_one_engine_and_told_its_layers(rig: Rig) -> None:
    """The second stage has the first layers of its own table where the decoder has later ones."""
    stages = [
        msgspec.structs.replace(SHAPE, layers=name, pipeline_parallel_size=2, tensor_parallel_size=2) for name in LAYERS
    ]
    rig.half.greet_workers(
        {
            (stage, rank): replace(rig.worker, shape=shape, control=f"tcp://127.0.0.1:{stage}{rank}")
            for stage, shape in enumerate(stages)
            for rank in range(2)
        }
    )
    hello = greet(rig)
    assert hello.shape.layers.split() == LAYERS
    assert differences(SHAPE, hello.shape) == []
    assert [c.endpoint[-2:] for c in hello.controls] == ["00", "01", "10", "11"]
    dispatch(rig, reservation(rig))
    (begin,) = rig.step().orders.begins
    assert list(begin.layers) == LAYERS


def test_every_answer_says_what_the_clock_reads_then(rig: Rig) -> None:
    hello = rig.add(1, params=to_params(HELLO, Hello(protocol=PROTOCOL_VERSION, decoder="d")), max_tokens=1)
    step = rig.schedule()
    rig.clock.advance(3.0)
    rig.complete(step)
    request = dispatch(rig, reservation(rig))
    step = rig.schedule()
    rig.clock.advance(5.0)
    rig.complete(step)
    clocks = {o.request_id: parse_reply(o.kv_transfer_params).clock for o in rig.outputs if o.finish_reason}
    assert clocks[hello.request_id] == rig.clock.now - 5.0
    assert clocks[request.request_id] == rig.clock.now


def test_a_lease_ends_when_the_decoder_stops_waiting(rig: Rig) -> None:
    """By this clock, as it was given back: the dispatch may have been on its way for long."""
    dispatch(rig, reservation(rig, expires_at=rig.clock.now + 7.0))
    (begin,) = rig.step().orders.begins
    assert begin.lease_s == 7.0


def test_a_lease_is_no_longer_than_it_says(rig: Rig) -> None:
    dispatch(rig, reservation(rig, expires_at=rig.clock.now + 700.0))
    (begin,) = rig.step().orders.begins
    assert begin.lease_s == 60.0


def test_a_reservation_that_is_read_after_its_decoder_gave_it_up_is_declined(rig: Rig) -> None:
    before = rig.free_blocks
    wanted = reservation(rig, expires_at=rig.clock.now + 7.0)
    rig.clock.advance(7.0)
    request = dispatch(rig, wanted)
    step = rig.step()
    assert (step.orders.begins, step.orders.writes) == ([], [])  # law 1
    reply = reply_of(rig, request)
    assert (reply.declined, reply.expired) == (True, True)
    assert "stopped waiting" in reply.error
    rig.run_until_done()
    assert rig.free_blocks == before


def test_a_whole_prompt_is_sent_in_one_step_and_kept_until_every_rank_has_sent_it(rig: Rig) -> None:
    wanted = reservation(rig)
    before = rig.free_blocks
    request = dispatch(rig, wanted)
    step = rig.schedule()
    assert step.tokens == {request.request_id: PROMPT}
    (begin,) = step.orders.begins
    assert (begin.reservation, begin.lease_s) == (wanted, 60.0)
    blocks = rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    assert sent(step) == list(zip(blocks, wanted.blocks[0], strict=True))
    rig.complete(step)
    assert reply_of(rig, request) == DispatchReply(pages=PAGES)
    step = rig.schedule()
    (close,) = step.orders.closes
    assert (close.transfer_id, close.request_id, close.cancel, close.report) == (
        TRANSFER,
        request.request_id,
        False,
        True,
    )
    assert before - rig.free_blocks == PAGES  # law 2
    assert rig.scheduler.has_requests()
    rig.complete(step, sent={request.request_id})
    rig.run_until_done()
    assert rig.free_blocks == before


def test_chunks_send_the_pages_they_complete_by_position(make: MakeRig) -> None:
    rig = make(max_batched=40)
    wanted = reservation(rig)
    request = dispatch(rig, wanted)
    pairs: list[tuple[int, int]] = []
    lengths: list[int] = []
    while request.request_id in rig.scheduler.requests and not request.is_finished():
        step = rig.step()
        lengths.append(len(sent(step)))
        pairs += sent(step)
    assert lengths == [2, 3, 2]  # 40, 80 and 100 tokens; the partial last page waits for the end
    blocks = rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    assert pairs == list(zip(blocks, wanted.blocks[0], strict=True))


def test_a_prefix_hit_is_sent_with_the_first_step(make: MakeRig) -> None:
    rig = make()
    rig.add(PROMPT, max_tokens=1)
    rig.run_until_done()
    wanted = reservation(rig)
    request = dispatch(rig, wanted)
    step = rig.schedule()
    assert step.tokens == {request.request_id: PROMPT - 6 * BLOCK}
    assert [dst for _, dst in sent(step)] == wanted.blocks[0]


def test_pages_the_decoder_has_are_not_sent(rig: Rig) -> None:
    wanted = reservation(rig, first_page=3)
    request = dispatch(rig, wanted)
    step = rig.schedule()
    blocks = rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    assert sent(step) == list(zip(blocks[3:], wanted.blocks[0], strict=True))


def test_a_preempted_prefill_is_announced_and_sends_no_page_twice(make: MakeRig) -> None:
    rig = make(max_batched=40)
    wanted = reservation(rig)
    request = dispatch(rig, wanted)
    targets = [dst for _, dst in sent(rig.step())]
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    step = rig.schedule()
    assert step.orders.preempted == [TRANSFER]
    rig.complete(step)
    targets += [dst for _, dst in sent(step)]
    begins = len(step.orders.begins)
    while not request.is_finished():
        step = rig.step()
        targets += [dst for _, dst in sent(step)]
        begins += len(step.orders.begins)
    assert targets == wanted.blocks[0]  # law 4
    assert begins == 0


def test_an_aborted_prefill_is_cancelled_and_kept_until_it_is_quiet(make: MakeRig) -> None:
    rig = make(max_batched=40)
    wanted = reservation(rig)
    before = rig.free_blocks
    request = dispatch(rig, wanted)
    rig.step()
    rig.abort(request)
    assert rig.free_blocks < before  # law 2
    step = rig.schedule()
    (close,) = step.orders.closes
    assert (close.cancel, close.report) == (True, True)
    rig.complete(step, sent={request.request_id})
    rig.run_until_done()
    assert rig.free_blocks == before


def test_an_abort_before_the_first_step_leaves_nothing_behind(rig: Rig) -> None:
    wanted = reservation(rig)
    before = rig.free_blocks
    request = dispatch(rig, wanted)
    rig.abort(request)
    step = rig.schedule()
    assert [(c.cancel, c.report) for c in step.orders.closes] == [(True, False)]
    rig.complete(step)
    rig.run_until_done()
    assert rig.free_blocks == before


def test_a_failure_of_a_writer_is_in_the_answer(make: MakeRig) -> None:
    rig = make(max_batched=60)
    request = dispatch(rig, reservation(rig))
    rig.step(failures={TRANSFER: "a write of layers [0] failed"})
    rig.step()
    assert reply_of(rig, request).error == "a write of layers [0] failed"
    (close,) = rig.step(sent={request.request_id}).orders.closes
    assert close.cancel


def test_time_in_the_queue_counts_against_the_lease(rig: Rig) -> None:
    dispatch(rig, reservation(rig))
    rig.clock.advance(45.0)
    assert rig.schedule().orders.begins[0].lease_s == pytest.approx(15.0)


RANK = DecoderRank(descriptor="", pages=handshake().pages)


def geometry(**changes: Any) -> CacheGeometry:
    return msgspec.structs.replace(SHAPE.geometry(), **changes)


BAD = {
    "one page too few": ("are reserved for tokens", {"blocks": [list(range(1, PAGES))]}),
    "one page too many": ("are reserved for tokens", {"blocks": [list(range(1, PAGES + 2))]}),
    "beyond the decoder's pool": ("block 64 of a pool", {"blocks": [[*range(1, PAGES), 64]]}),
    "the same block twice": ("reserved twice", {"blocks": [[1, 1, *range(2, PAGES)]]}),
    "two groups for one": ("cache groups", {"blocks": [list(range(1, PAGES + 1)), [PAGES + 1]]}),
    "starts behind the prompt": ("are there already", {"local_tokens": 100 * BLOCK}),
    "other heads": ("num_kv_heads: here 4, there 8", {"geometry": geometry(num_kv_heads=8)}),
    "other slots": ("slot_bytes: here 8, there 16", {"geometry": geometry(slot_bytes=16)}),
    "a block size that is no multiple": (
        "block_size: here 16, there 24",
        {"geometry": geometry(block_size=24), "blocks": [list(range(1, 6))]},
    ),
    "heads that do not divide": ("neither divides", {"geometry": geometry(tp_size=3), "ranks": [RANK] * 3}),
    "pages of another size than the geometry says": (
        "where the geometry makes",
        {"geometry": geometry(block_size=2 * BLOCK), "blocks": [list(range(1, 5))]},
    ),
    "fewer ranks than the geometry has": ("1 ranks of a tensor_parallel_size of 2", {"geometry": geometry(tp_size=2)}),
    "another prefiller process": ("restarted", {"prefiller_generation": "f" * 16}),
    "two ranks for one": ("2 ranks of a tensor_parallel_size of 1", {"ranks": [RANK] * 2}),
    "pages outside its region": (
        "of a region of 10 B",
        {"ranks": [DecoderRank(descriptor="", pages=msgspec.structs.replace(handshake().pages, size_bytes=10))]},
    ),
    "another number of layers": (
        "1 layers there",
        {"ranks": [DecoderRank(descriptor="", pages=msgspec.structs.replace(handshake().pages, layer_offsets=[0]))]},
    ),
}
"""What the reply must say, so that no check stands in for another, and what is wrong with the reservation."""


@pytest.mark.parametrize(("text", "changes"), BAD.values(), ids=list(BAD))
def test_a_reservation_that_does_not_fit_costs_one_token_and_says_why(
    rig: Rig, text: str, changes: dict[str, Any]
) -> None:
    wanted = reservation(rig, **changes)
    before = rig.free_blocks
    request = dispatch(rig, wanted)
    step = rig.schedule()
    assert step.tokens == {request.request_id: 1}
    assert not step.orders.begins
    assert not step.orders.writes
    rig.complete(step)
    reply = reply_of(rig, request)
    assert text in reply.error
    assert reply.declined
    assert reply.pages == 0
    assert (reply.hello is not None) == ("prefiller_generation" in changes)
    rig.run_until_done()
    assert rig.free_blocks == before
    assert rig.counters["refused_params"] == 1


def test_a_transfer_that_is_being_served_is_refused_a_second_time(rig: Rig) -> None:
    wanted = reservation(rig)
    first, second = dispatch(rig, wanted), dispatch(rig, wanted)
    step = rig.step()
    assert step.tokens == {first.request_id: PROMPT, second.request_id: 1}
    assert len(step.orders.begins) == 1
    reply = reply_of(rig, second)
    assert "already" in reply.error
    assert not reply.declined  # the first is being written for: a decoder must fence it (law 1)


def test_another_protocol_is_refused_in_the_answer(rig: Rig) -> None:
    request = dispatch(rig, reservation(rig, protocol=PROTOCOL_VERSION + 1))
    rig.run_until_done()
    assert "protocol" in reply_of(rig, request).error


@pytest.mark.parametrize("params", [{RESERVATION: 5}, {RESERVATION: {"protocol": PROTOCOL_VERSION}}, {HELLO: [[]]}])
def test_malformed_messages_hurt_nobody_else(rig: Rig, params: dict[str, Any]) -> None:
    before = rig.free_blocks
    bad, good = rig.add(PROMPT, params=params), rig.add(BLOCK, seed=1)
    rig.run_until_done()
    assert bad.is_finished()
    assert good.status is RequestStatus.FINISHED_LENGTH_CAPPED  # law 12
    assert rig.free_blocks == before
    assert rig.counters["refused_params"] == 1


def test_ordinary_requests_are_served_as_by_any_server(rig: Rig) -> None:
    request = rig.add(PROMPT)
    step = rig.schedule()
    assert step.tokens == {request.request_id: PROMPT}
    assert not step.orders.writes
    rig.complete(step)
    rig.run_until_done()
    assert rig.outputs[-1].kv_transfer_params is None


def test_a_prefill_aborted_between_its_preemption_and_the_next_step_is_still_announced(make: MakeRig) -> None:
    """Its blocks are free already, so the workers must wait for the writes that read them (law 2)."""
    rig = make(max_batched=40)
    request = dispatch(rig, reservation(rig))
    rig.step()
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.abort(request)
    step = rig.schedule()
    assert step.orders.preempted == [TRANSFER]
    rig.complete(step, sent={request.request_id})
    rig.run_until_done()
