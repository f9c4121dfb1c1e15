"""vLLM's V2 model runner itself, with a model and a drafter, on a CPU: hooks, pages, and a chunk of one token."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_pd_connector.testing.machine import SECOND_RUNNER, environment, num_gpus

SCRIPT = Path(__file__).with_name("second_runner_prefiller.py")
LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in range(9)]
CHUNKS, PAGES = 4, 32

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(num_gpus()), reason="V2 is the default on a GPU: the server tier runs it there"),
    pytest.mark.skipif(find_spec("triton") is None, reason="V2's kernels need Triton, if only its interpreter"),
]


@pytest.fixture(scope="module")
def result() -> Any:
    env = environment(cores=[0], gpus=[], extra={**SECOND_RUNNER, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    env.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def test_every_page_arrives_as_the_v2_runner_computed_it(result: Any) -> None:
    assert "vllm.v1.worker.gpu.model_runner" in result["runner"]
    assert result["pages"] == len(LAYERS) * PAGES
    assert result["equal"] == result["pages"]
    assert result["replied"] == PAGES


def test_every_layer_of_every_chunk_is_announced_by_its_hook(result: Any) -> None:
    """The drafter's layer for each of its two guesses, after sampling, within the same step."""
    assert [step["hooks"] for step in result["steps"]] == [[*LAYERS, LAYERS[-1]]] * CHUNKS
    assert result["unannounced"] == 0


def test_the_last_chunk_is_one_for_which_a_gpu_would_replay_a_full_graph(result: Any) -> None:
    """One prompt token after others: the row counts as decoding. Here, without graphs, its hooks fire all the same."""
    assert [step["may_replay"] for step in result["steps"]] == [False, False, False, True]
