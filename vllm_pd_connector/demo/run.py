"""The demo: the same questions to a prefiller/decoder pair and to one ordinary server, compared. Ends by itself."""

import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_pd_connector.demo import prompts
from vllm_pd_connector.demo.client import Answer, AskFailed, ask
from vllm_pd_connector.demo.moments import NoTimelineFound, read_moments
from vllm_pd_connector.demo.prompts import Question
from vllm_pd_connector.demo.screen import StartProgress, paragraph, section, shortened
from vllm_pd_connector.demo.timeline_figure import draw, exposed_ms
from vllm_pd_connector.demo.verdict import compare
from vllm_pd_connector.testing.machine import HOST, environment, free_ports, num_gpus
from vllm_pd_connector.testing.models import ModelBuildError, smollm2
from vllm_pd_connector.testing.process_group import ProcessGroup, stop_all
from vllm_pd_connector.testing.servers import Server, ServerFailed, ServerSpec, start_all

OUTPUT = Path("demo-output")
PROXY = Path(__file__).parents[2] / "examples" / "disaggregated_proxy.py"
PROXY_START_S = 30.0
START_S = 300.0
SETTLE_S = 1.2  # vLLM's queue readers spin for a second after their last message; they share the core with the next
BLOCK_SIZE = 32
CHUNK_TOKENS = 1024
VALUE_BYTES = 2  # bfloat16
WHAT = ("prefills prompts, writes their KV pages", "takes requests, decodes", "one ordinary vLLM, for comparison")


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that runs.

    Attributes:
        entry: where clients send requests to the pair.
    """

    model: str
    prefiller: Server
    decoder: Server
    ordinary: Server
    entry: str


@dataclass(slots=True)
class Tally:
    """What the demo has seen so far."""

    num_different: int = 0
    expected_bytes: int = 0


def demo() -> int:
    """Run it; the status is 1 when an answer differs from the ordinary server's or a server fails."""
    started = time.monotonic()
    try:
        model = smollm2()
        OUTPUT.mkdir(exist_ok=True)
        for old in (OUTPUT / "timeline").glob("*.jsonl"):
            old.unlink()
        with _stage(model) as stage:
            different = _show(stage)
    except (ServerFailed, AskFailed, ModelBuildError) as error:
        print(f"\nvllm-pd demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nvllm-pd demo: interrupted; every server is stopped", file=sys.stderr)
        return 130
    section(f"Done in {time.monotonic() - started:.0f} s; every server is stopped")
    _how_to_go_on(model)
    return 1 if different else 0


@contextmanager
def _stage(model: Path) -> Iterator[Stage]:
    """The three servers and the proxy."""
    section("Starting three vLLM servers with SmolLM2-135M-Instruct in bfloat16")
    timeline = str((OUTPUT / "timeline").absolute())
    args = ["--dtype", "bfloat16", "--max-num-batched-tokens", str(CHUNK_TOKENS)]
    specs = [
        ServerSpec(model, "prefiller", name="prefiller", args=args, extra={"timeline_dir": timeline}),
        ServerSpec(
            model, "decoder", name="decoder", args=args, extra={"timeline_dir": timeline, "min_remote_tokens": 1}
        ),
        ServerSpec(model, "plain", name="ordinary", args=args),
    ]
    with start_all(specs, START_S, log_dir=OUTPUT / "logs", progress=StartProgress(WHAT)) as servers:
        prefiller, decoder, ordinary = servers
        placement = _pin(servers)
        with _proxy(decoder.url) as entry:
            print(f"   ● proxy        {entry} → {decoder.url}\n   {placement}")
            yield Stage(str(model), prefiller, decoder, ordinary, entry)


def _pin(servers: Sequence[Server]) -> str:
    """Prefiller and decoder on a core each, the ordinary server on a third or on the prefiller's; says so.

    Only now: while they load, the servers share all cores. Not on a machine with GPUs.
    """
    if num_gpus():
        return "the servers share the GPUs"
    cores = sorted(os.sched_getaffinity(0))
    chosen = [cores[0], cores[min(1, len(cores) - 1)], cores[2] if len(cores) > 2 else cores[0]]
    for server, core in zip(servers, chosen, strict=True):
        server.pin([core])
    return "one CPU core each: " + ", ".join(f"{s.name} {c}" for s, c in zip(servers, chosen, strict=True))


@contextmanager
def _proxy(decoder: str) -> Iterator[str]:
    """The example proxy in front of the decoder; the decoder itself where the examples are not installed."""
    if not PROXY.exists():
        yield decoder
        return
    port = free_ports(1)[0]
    command = [sys.executable, str(PROXY), "--decoders", decoder, "--port", str(port)]
    log = OUTPUT / "logs" / "proxy.log"
    group = ProcessGroup(command, env=environment(cores=(), gpus=(), extra={}), log=log)
    try:
        deadline = time.monotonic() + PROXY_START_S
        while not _answers(f"http://{HOST}:{port}/health"):
            if time.monotonic() > deadline or not group.is_alive:
                raise ServerFailed(f"the proxy did not start; {log}:\n{log.read_text()}")
            time.sleep(0.1)
        yield f"http://{HOST}:{port}"
    finally:
        stop_all([group])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _show(stage: Stage) -> int:
    """Ask everything and print what came of it; the number of answers that differ."""
    tally = Tally()
    written_before = stage.prefiller.metrics().get("bytes_written", 0.0)
    _both(stage, prompts.warm_up(), tally)
    _compare(stage, prompts.sentence(), tally)
    long_split, _ = _compare(stage, prompts.long_document(), tally)
    _compare(stage, prompts.conversation(), tally, live=True)
    _times(stage, tally)
    _bytes(stage, tally, written_before)
    _timeline(long_split)
    return tally.num_different


def _both(
    stage: Stage, question: Question, tally: Tally, *, live: bool = False, ordinary_first: bool = False
) -> tuple[Answer, Answer]:
    """One question to the pair and to the ordinary server, one after the other."""
    shown = (lambda text: print(text, end="", flush=True)) if live else (lambda _text: None)
    turns = ["ordinary", "split"] if ordinary_first else ["split", "ordinary"]
    answers: dict[str, Answer] = {}
    for turn in turns:
        time.sleep(SETTLE_S)
        url = stage.entry if turn == "split" else stage.ordinary.url
        answers[turn] = ask(url, stage.model, question, shown if turn == "split" else lambda _text: None)
    tally.expected_bytes += _kv_bytes(stage.model, answers["split"].prompt_tokens)
    return answers["split"], answers["ordinary"]


def _compare(stage: Stage, question: Question, tally: Tally, *, live: bool = False) -> tuple[Answer, Answer]:
    section(question.title)
    messages = question.body.get("messages")
    paragraph(f"» {shortened(messages[-1]['content'] if messages else question.body['prompt'])}")
    if live:
        print("   ", end="")
    split, ordinary = _both(stage, question, tally, live=live)
    print() if live else paragraph(split.text)
    verdict = compare(split, ordinary)
    tally.num_different += verdict.kind == "different"
    print(f"   {verdict.text}")
    print(
        f"   {split.prompt_tokens:,} prompt tokens; first token after {split.first_token_s * 1e3:,.0f} ms, "
        f"ordinary server {ordinary.first_token_s * 1e3:,.0f} ms",
        flush=True,
    )
    return split, ordinary


def _times(stage: Stage, tally: Tally) -> None:
    """First-token times, the two sides taking turns to go first."""
    section("Time to the first token, three documents of 1,000 tokens that share no page")
    pairs: list[tuple[float, float]] = []
    for index, question in enumerate(prompts.timed_documents()):
        split, ordinary = _both(stage, question, tally, ordinary_first=index % 2 == 1)
        tally.num_different += compare(split, ordinary).kind == "different"
        pairs.append((split.first_token_s * 1e3, ordinary.first_token_s * 1e3))
    here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
    runs = ", ".join(f"{a:,.0f} / {b:,.0f}" for a, b in pairs)
    print(f"   median: prefiller + decoder {here:,.0f} ms, ordinary server {there:,.0f} ms ({here - there:+,.0f} ms)")
    print(f"   each:   {runs} ms\n   Every prompt was new to both servers: no prefix cache took part.", flush=True)


def _bytes(stage: Stage, tally: Tally, before: float) -> None:
    section("Bytes moved")
    deadline = time.monotonic() + 3
    while (moved := stage.prefiller.metrics()["bytes_written"] - before) < tally.expected_bytes:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    share = moved / tally.expected_bytes
    print(f"   written by the prefiller   {moved:15,.0f} bytes")
    print(f"   KV of the same prompts     {tally.expected_bytes:15,.0f} bytes, in whole pages of {BLOCK_SIZE} tokens")
    print(f"   {'✓ every page once, nothing else' if share == 1 else f'written ÷ KV = {share:.4f}'}", flush=True)


def _kv_bytes(model: str, prompt_tokens: int) -> int:
    """KV bytes of what a prefiller computes of a prompt, all but its last token, in whole pages."""
    config = json.loads((Path(model) / "config.json").read_text())
    pages = -(-(prompt_tokens - 1) // BLOCK_SIZE)
    page_bytes = 2 * BLOCK_SIZE * config["num_key_value_heads"] * config["head_dim"] * VALUE_BYTES  # K and V
    return int(pages * config["num_hidden_layers"] * page_bytes)


def _timeline(split: Answer) -> None:
    section("Timeline of the 3,000-token document")
    files = [(OUTPUT / f"timeline.{suffix}").absolute() for suffix in ("png", "svg")]
    try:
        moments = read_moments(
            OUTPUT / "timeline", split.request_id, sent_ns=split.sent_ns, first_token_ns=split.first_ns
        )
    except NoTimelineFound as error:
        print(f"   no picture: {error}")
        return
    draw(moments, f"One request of {split.prompt_tokens:,} tokens, layer by layer", files)
    print(f"   The last write was done {exposed_ms(moments):.1f} ms after the last layer was computed.")
    print(*(f"   {file}" for file in files), sep="\n", flush=True)


def _how_to_go_on(model: Path) -> None:
    paragraph(
        f"Logs and timelines: {OUTPUT.absolute()}\nModel: {model}\n"
        "To start the same by hand, with three commands: examples/README.md"
    )
