"""One transfer's moments, read back from the timeline files of both servers."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_pd_connector.errors import PDConnectorError


class NoTimelineFound(PDConnectorError):
    """The timeline files do not hold the request."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of work on one layer, in milliseconds since the client sent the request."""

    layer: int
    start: float
    end: float
    chunk: int


@dataclass(slots=True, kw_only=True)
class Moments:
    """All times in milliseconds since the client sent the request.

    Attributes:
        chunks: (start, tokens computed after it) of each chunk of the prompt on the prefiller.
        computed: each layer's forward pass.
        written: each layer's write, from posting until the transport said that it is done.
        marks: (time, what) of single moments, in order.
        pages: blocks reserved.
        bytes_written: sum over the writes.
    """

    chunks: list[tuple[float, int]] = field(default_factory=list)
    computed: list[Bar] = field(default_factory=list)
    written: list[Bar] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    pages: int = 0
    bytes_written: int = 0

    @property
    def num_layers(self) -> int:
        return max(bar.layer for bar in self.computed) + 1

    def at(self, what: str) -> float:
        """When a single moment was; KeyError if it never was."""
        return {name: time for time, name in self.marks}[what]


def read_moments(directory: Path, request_id: str, *, sent_ns: int, first_token_ns: int) -> Moments:
    """The transfer of the request with that id.

    Args:
        directory: `timeline_dir` of both servers.
        request_id: as in the response to the client; vLLM appends to it.
        sent_ns: this host's monotonic clock when the client sent the request.
        first_token_ns: when the client had the first token.

    Raises:
        NoTimelineFound: it was not transferred, or the files are elsewhere.
    """
    lines = [json.loads(line) for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]
    reserved = next((line for line in lines if request_id in str(line.get("request", ""))), None)
    if reserved is None:
        raise NoTimelineFound(f"no reservation for {request_id} in {directory}")
    mine = sorted((line for line in lines if line["transfer"] == reserved["transfer"]), key=lambda line: line["at_ns"])
    moments = Moments(pages=reserved["pages"])
    reader = _Reader(moments, sent_ns)
    for line in mine:
        reader.take(line)
    moments.marks += [(0.0, "sent"), ((first_token_ns - sent_ns) / 1e6, "first token")]
    moments.marks.sort()
    if not moments.computed or not moments.written:
        raise NoTimelineFound(f"transfer {reserved['transfer']} has no layer times in {directory}")
    return moments


class _Reader:
    """Turns lines in order of time into bars."""

    def __init__(self, moments: Moments, sent_ns: int) -> None:
        self._moments = moments
        self._sent_ns = sent_ns
        self._last_ms = 0.0
        self._posted: dict[tuple[int, ...], list[float]] = {}

    def take(self, line: dict[str, Any]) -> None:
        moments, at = self._moments, (line["at_ns"] - self._sent_ns) / 1e6
        chunk = len(moments.chunks) - 1
        match line["moment"]:
            case "chunk_scheduled":
                moments.chunks.append((at, line["computed"]))
                self._last_ms = at
            case "layer_computed":
                moments.computed.append(Bar(line["layer"], self._last_ms, at, chunk))
                self._last_ms = at
            case "write_posted":
                self._posted.setdefault(tuple(line["layers"]), []).append(at)
            case "write_done":
                start = self._posted[tuple(line["layers"])].pop(0)
                moments.written += [Bar(layer, start, at, chunk) for layer in line["layers"]]
                moments.bytes_written += line["bytes"]
            case "reserved" | "dispatched" | "received" | "released" as what:
                moments.marks.append((at, what))
