"""Several cache groups inside a real vLLM scheduler: window groups reserve, send and count only what will be read."""

from collections.abc import Callable
from pathlib import Path

import pytest
from scheduler_rig import BLOCK, LAYERS, Rig, make_rig
from vllm.v1.request import RequestStatus

from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.testing.shapes import some_shape
from vllm_pd_connector.wire.messages import DecoderRank, Hello, Reservation
from vllm_pd_connector.wire.transfer_params import HELLO, RESERVATION, parse_reply, to_params
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

MakeRig = Callable[..., Rig]
WINDOW = 20
PROMPT = 6 * BLOCK + 4
NUM_TOKENS = PROMPT - 1  # what a decoder asks for
FIRST_READ = NUM_TOKENS + 1 - WINDOW
SHAPE = some_shape(block_size=BLOCK, layers=" ".join(f"{name}@{i}" for i, name in enumerate(LAYERS)))


@pytest.fixture
def make(tmp_path: Path) -> MakeRig:
    return lambda **more: make_rig(tmp_path, window=WINDOW, shape=SHAPE, **more)


def test_a_decoder_reserves_the_pages_of_the_window_only(make: MakeRig) -> None:
    rig = make()
    before = rig.free_blocks
    request = rig.add(PROMPT)
    step = rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    (expect,) = step.orders.expects
    assert expect.spans == (Span(0, NUM_TOKENS), Span(FIRST_READ, NUM_TOKENS))
    full, window = rig.dispatcher.dispatched[0].reservation.blocks
    assert (len(full), len(window)) == (7, 7 - FIRST_READ // BLOCK)
    assert 0 not in full + window
    assert len({*full, *window}) == len(full + window) == before - rig.free_blocks
    rig.step(received={request.request_id})
    assert rig.schedule().tokens == {request.request_id: 1}


def test_fenced_pages_are_those_of_all_groups(make: MakeRig) -> None:
    rig = make()
    before = rig.free_blocks
    request = rig.add(PROMPT)
    transfer = rig.step().orders.expects[0].transfer_id
    pages = [block for blocks in rig.dispatcher.dispatched[0].reservation.blocks for block in blocks]
    rig.abort(request)
    rig.obey(rig.schedule())
    assert request.request_id not in rig.scheduler.requests
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[page].ref_cnt for page in pages)  # law 1
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.run_until_done(limit=200)
    assert rig.free_blocks == before


@pytest.mark.parametrize("max_batched", [2048, 40, 17])
def test_a_prefiller_sends_what_will_be_read_whatever_the_chunks(make: MakeRig, max_batched: int) -> None:
    rig = make(role="kv_producer", max_batched=max_batched)
    greeting = rig.add(1, params=to_params(HELLO, Hello(protocol=PROTOCOL_VERSION, decoder="d")), max_tokens=1)
    rig.run_until_done()
    hello = parse_reply(next(o for o in rig.outputs if o.request_id == greeting.request_id).kv_transfer_params).hello
    assert hello is not None
    full, window = list(range(50, 43, -1)), list(range(40, 40 - (7 - FIRST_READ // BLOCK), -1))
    reservation = Reservation(
        protocol=PROTOCOL_VERSION,
        transfer_id="a" * 32,
        decoder="d",
        decoder_generation="d" * 16,
        prefiller_generation=hello.generation,
        local_tokens=0,
        blocks=[full, window],
        lease_s=60.0,
        geometry=SHAPE.geometry(),
        ranks=[DecoderRank(descriptor="cmFuayAw", pages=rig.worker.pages)],
    )
    request = rig.add(NUM_TOKENS, params=to_params(RESERVATION, reservation), max_tokens=1)
    sent: tuple[list[int], list[int]] = ([], [])
    covered: list[Span] = []
    while not request.is_finished():
        step = rig.schedule()
        tables = rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for write in step.orders.writes:
            for group, part in enumerate(write.groups):
                assert 0 not in part.src_blocks  # what left the window is never read
                assert list(part.src_blocks) == [tables[group][page] for page in part.span.pages(BLOCK)]
                sent[group].extend(part.dst_blocks)
            covered.append(write.groups[1].span)
        rig.complete(step)
    assert sent == (full, window)  # law 4
    assert sum(len(span) for span in covered) == NUM_TOKENS - FIRST_READ
