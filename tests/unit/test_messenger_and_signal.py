"""The messenger's turn without a thread, the host layer signal, and scripted faults on a transport."""

import threading
import time
from collections.abc import Callable

import pytest

from vllm_pd_connector.engine.layer_signal import HostLayerSignal, PlainSignals
from vllm_pd_connector.engine.messenger import Messenger
from vllm_pd_connector.geometry.page_table import whole_pages
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.clock import FakeClock
from vllm_pd_connector.testing.shapes import bound_pieces
from vllm_pd_connector.transport.base import WriteStatus, post_write
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport
from vllm_pd_connector.transport.scripted import HANG_S, Action, ScriptedFault, ScriptedTransport


class Duty:
    def __init__(self, *, is_busy: bool = False, fails: bool = False) -> None:
        self.is_busy = is_busy
        self.fails = fails
        self.advanced = 0
        self.happened = threading.Event()

    def advance(self) -> None:
        self.advanced += 1
        self.happened.set()
        if self.fails:
            raise RuntimeError("a duty failed")


class TestMessenger:
    def test_a_turn_carries_out_the_inbox_in_order_then_each_duty(self) -> None:
        duty = Duty()
        messenger = Messenger([duty], 0.001)
        done: list[str] = []
        messenger.submit(lambda: done.append("first"))
        messenger.submit(lambda: done.append(f"second after {duty.advanced} advances"))
        assert not messenger.turn()
        assert done == ["first", "second after 0 advances"]
        assert duty.advanced == 1

    def test_what_raises_does_not_stop_the_rest(self) -> None:
        done: list[str] = []
        failing, sound = Duty(fails=True), Duty()
        messenger = Messenger([failing, sound], 0.001)
        messenger.submit(lambda: 1 / 0)
        messenger.submit(lambda: done.append("still here"))
        messenger.turn()
        assert done == ["still here"]
        assert (failing.advanced, sound.advanced) == (1, 1)

    @pytest.mark.parametrize("busy", [(False, False), (True, False), (False, True)])
    def test_busy_when_one_duty_is(self, busy: tuple[bool, bool]) -> None:
        assert Messenger([Duty(is_busy=b) for b in busy], 0.001).turn() == any(busy)

    def test_an_action_of_an_action_runs_in_the_same_turn(self) -> None:
        messenger = Messenger([], 0.001)
        done: list[str] = []
        messenger.submit(lambda: messenger.submit(lambda: done.append("inner")))
        messenger.turn()
        assert done == ["inner"]

    def test_an_idle_thread_sleeps_until_it_is_woken(self) -> None:
        duty = Duty()
        messenger = Messenger([duty], 0.0001)
        messenger.start()
        try:
            assert duty.happened.wait(5)
            settled = threading.Event()
            messenger.submit(settled.set)
            assert settled.wait(5)
            before = duty.advanced
            assert not threading.Event().wait(0.05)  # five hundred pauses: a busy thread would have turned
            assert duty.advanced <= before + 5  # law 15: at most the turns that `submit` asked for
            duty.happened.clear()
            messenger.bell.ring()
            assert duty.happened.wait(5)
        finally:
            messenger.stop()

    def test_a_busy_thread_keeps_turning_by_itself(self) -> None:
        duty = Duty(is_busy=True)
        messenger = Messenger([duty], 0.0001)
        messenger.start()
        try:
            for _ in range(3):
                duty.happened.clear()
                assert duty.happened.wait(5)
        finally:
            messenger.stop()


class TestHostLayerSignal:
    def test_layers_come_once_in_the_order_of_their_bumps(self) -> None:
        signal = HostLayerSignal(4)
        signal.bump(2)
        signal.bump(0)
        assert [layer for layer, _ in signal.take()] == [2, 0]
        signal.bump(2)
        signal.bump(3)
        assert [layer for layer, _ in signal.take()] == [3]
        assert signal.take() == []

    def test_finish_gives_the_layers_without_a_hook(self) -> None:
        signal = HostLayerSignal(3)
        signal.bump(1)
        signal.take()
        signal.finish()
        assert sorted(layer for layer, _ in signal.take()) == [0, 2]
        assert signal.take() == []

    def test_nothing_is_ready_before_its_bump(self) -> None:
        assert HostLayerSignal(3).take() == []

    def test_the_cpu_gets_the_host_signal(self) -> None:
        assert isinstance(PlainSignals("cpu", 2).begin_step(), HostLayerSignal)


def scripted(
    action: Action, nth: int = 1, count: int = 1, clock: Callable[[], float] = time.monotonic
) -> tuple[ScriptedTransport, KvBuffer, KvBuffer, MemoryTransport]:
    fabric = MemoryFabric()
    src = KvBuffer(num_layers=1, num_blocks=5, page_bytes=8)
    dst = KvBuffer(num_layers=1, num_blocks=5, page_bytes=8)
    src.fill_random(1)
    sender = ScriptedTransport(MemoryTransport(fabric, "s"), [ScriptedFault(action, nth, count)], clock)
    target = MemoryTransport(fabric, "t")
    sender.register(src.table)
    target.register(dst.table)
    return sender, src, dst, target


def write_block(transport: ScriptedTransport, src: KvBuffer, dst: KvBuffer, *blocks: int) -> WriteStatus:
    peer = transport.connect(b"t", dst.table)
    lane = transport.open_lane(peer, whole_pages(src.table), whole_pages(dst.table))
    handle = post_write(transport, lane, bound_pieces(blocks, blocks), bytes(blocks))
    status = transport.poll(handle)
    for _ in range(3):
        status = transport.poll(handle)
    assert transport.release(handle) == (status is not WriteStatus.POSTED)
    return status


class TestScriptedFaults:
    @pytest.mark.parametrize(
        ("action", "status"),
        [("drop", WriteStatus.DONE), ("fail", WriteStatus.FAILED), ("hang", WriteStatus.POSTED)],
    )
    def test_only_the_named_write_suffers_and_carries_nothing(self, action: Action, status: WriteStatus) -> None:
        transport, src, dst, target = scripted(action, nth=1, count=2)
        seen = [write_block(transport, src, dst, block) for block in (1, 2, 3, 4)]
        assert seen == [WriteStatus.DONE, status, status, WriteStatus.DONE]
        assert target.notifications() == [b"\x01", b"\x04"]
        for block in (1, 4):
            assert bytes(dst.page(0, block)) == bytes(src.page(0, block))
        for block in (2, 3):
            assert not dst.page(0, block).any()

    def test_a_write_that_hangs_fails_in_the_end(self) -> None:
        clock = FakeClock()
        transport, src, dst, _ = scripted("hang", nth=0, clock=clock)
        lane = transport.open_lane(transport.connect(b"t", dst.table), whole_pages(src.table), whole_pages(dst.table))
        handle = post_write(transport, lane, bound_pieces([1], [1]), b"")
        clock.advance(HANG_S)
        assert transport.poll(handle) is WriteStatus.POSTED
        clock.advance(0.1)
        assert transport.poll(handle) is WriteStatus.FAILED
        assert transport.release(handle)

    def test_a_wrong_page_arrives_as_if_it_were_right(self) -> None:
        transport, src, dst, target = scripted("wrong_page", nth=0)
        assert write_block(transport, src, dst, 1, 2) is WriteStatus.DONE
        assert target.notifications() == [b"\x01\x02"]
        assert bytes(dst.page(0, 1)) == bytes(src.page(0, 2))
        assert bytes(dst.page(0, 2)) == bytes(src.page(0, 2))
