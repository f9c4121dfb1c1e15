"""A prefiller whose V2 model runner computes a real model, in a process of its own: `python THIS`, see the test.

The prompt takes four chunks, the last of one token: a row that V2 takes for decoding. Prints a JSON object.
"""

from __future__ import annotations

import base64
import ctypes
import json
import time
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from vllm_pd_connector.engine import connector
from vllm_pd_connector.engine.step import StepMetadata
from vllm_pd_connector.engine.worker_half import WorkerHalf
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.machine import SECOND_RUNNER_ARGS
from vllm_pd_connector.testing.models import random_eagle, random_llama
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport
from vllm_pd_connector.wire.messages import DecoderRank, Hello, Reservation
from vllm_pd_connector.wire.transfer_params import HELLO, RESERVATION, parse_reply, to_params
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

CHUNK, BLOCK = 341, 32
PROMPT = 3 * CHUNK + 1
PAGES = PROMPT // BLOCK
FIRST = 4
"""The decoder's first block."""
RESULT = "RESULT "
FABRIC = MemoryFabric()
TRANSFER = "a" * 32


def engine() -> LLM:
    """With a drafter, so that hooks also fire after sampling."""
    connector._open_transport = lambda _config, name, _placement: MemoryTransport(FABRIC, name)
    return LLM(
        str(random_llama()),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=2,
        max_num_batched_tokens=CHUNK,
        block_size=BLOCK,
        worker_cls=SECOND_RUNNER_ARGS[1],
        speculative_config={"method": "eagle", "model": str(random_eagle()), "num_speculative_tokens": 2},
        kv_transfer_config={
            "kv_connector": "PDConnector",
            "kv_role": "kv_producer",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"min_write_bytes": 1},
        },
    )


def ask(llm: LLM, prompt: list[int], params: dict[str, Any]) -> Any:
    """One token, and what comes with it."""
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args={"kv_transfer_params": params})
    (made,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return parse_reply(made.kv_transfer_params)


def page(table: PageTable, layer: int, block: int) -> bytes:
    return ctypes.string_at(table.address(layer, block), table.page_bytes)


class Watch:
    """What each step with writes was made of, seen from inside.

    Args:
        half: the worker half of this process.
        runner: vLLM's.
    """

    def __init__(self, half: WorkerHalf, runner: Any) -> None:
        self.steps: list[dict[str, Any]] = []
        self.sources: list[int] = []
        self.unannounced = 0
        self._is_decoding = False
        self._start, half.start_step = half.start_step, self.start_step  # type: ignore[method-assign]
        self._done, half.layer_done = half.layer_done, self.layer_done  # type: ignore[method-assign]
        half._note_unannounced = self.note_unannounced  # type: ignore[method-assign]
        self._gather, runner.gather_batch_req_state = runner.gather_batch_req_state, self.gather

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        state, uniform = self._gather(*args, **kwargs)
        self._is_decoding = bool(state is not None and state.decode_graph_eligible)
        return state, uniform

    def start_step(self, orders: StepMetadata) -> None:
        groups = [group for write in orders.writes for group in write.groups]
        self.sources += [block for group in groups for block in group.src_blocks if block not in self.sources]
        self.steps.append({"writes": len(orders.writes), "hooks": [], "may_replay": self._is_decoding})
        self._start(orders)

    def layer_done(self, name: str) -> None:
        self.steps[-1]["hooks"].append(name)
        self._done(name)

    def note_unannounced(self, num_layers: int) -> None:
        self.unannounced += num_layers


def main() -> None:
    llm = engine()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    half = get_kv_transfer_group()._w
    hello = ask(llm, [1], to_params(HELLO, Hello(protocol=PROTOCOL_VERSION, decoder="d"))).hello
    watch = Watch(half, runner)
    mine = half.handshake()
    kv = KvBuffer(num_layers=mine.pages.num_layers, num_blocks=FIRST + PAGES, page_bytes=mine.pages.page_bytes)
    decoder = MemoryTransport(FABRIC, "d")
    decoder.register(kv.table)
    wanted = Reservation(
        protocol=PROTOCOL_VERSION,
        transfer_id=TRANSFER,
        decoder="d",
        decoder_generation="d" * 16,
        prefiller_generation=hello.generation,
        local_tokens=0,
        blocks=[list(range(FIRST, FIRST + PAGES))],
        lease_s=60.0,
        geometry=mine.shape.geometry(),
        ranks=[DecoderRank(descriptor=base64.b64encode(b"d").decode(), pages=kv.table)],
    )
    prompt = torch.randint(3, 500, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    reply = ask(llm, prompt, to_params(RESERVATION, wanted))
    pairs = [(layer, *pair) for layer in range(kv.table.num_layers) for pair in enumerate(watch.sources, FIRST)]

    def num_equal() -> int:
        return sum(
            page(mine.pages, layer, src) == bytes(kv.page(layer, dst)) and bool(kv.page(layer, dst).any())
            for layer, dst, src in pairs
        )

    end = time.monotonic() + 10
    while num_equal() < len(pairs) and time.monotonic() < end:
        time.sleep(0.01)
    result = {
        "runner": [base.__module__ for base in type(runner).__mro__],
        "steps": [step for step in watch.steps if step["writes"]],
        "pages": len(pairs),
        "equal": num_equal(),
        "unannounced": watch.unannounced,
        "replied": reply.pages,
    }
    print(f"{RESULT}{json.dumps(result)}")


if __name__ == "__main__":
    main()
