"""The picture of one long request: each layer's compute and write, and the moments around them."""

from pathlib import Path
from typing import Any

from vllm_pd_connector.demo.moments import Bar, Moments

COMPUTE = ("#9db7d5", "#7d9dc4")  # chunks take turns, so that they are told apart
CHUNK_INK = "#4a6f9f"
WRITE = "#d9541e"
HOLD = "#f3efe6"
INK = "#2b2b2b"
FAINT = "#8a8a8a"
ROW = 0.4  # height of a bar; compute lies above its layer's line, write below
LABELS = {
    "sent": "sent by the client",
    "reserved": "pages reserved, request held",
    "dispatched": "dispatched to the prefiller",
    "received": "received by the prefiller",
    "released": "released",
    "first token": "first token",
}
NUM_ENLARGED = 4  # layers in the two side panels
SIZE = (15.0, 7.4)  # inches
DPI = 160


def draw(moments: Moments, title: str, files: list[Path]) -> None:
    """Draw into files; the format follows the suffix.

    Args:
        moments: of one transfer with at least one chunk.
        title: first line above the picture.
        files: PNG, SVG, …
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none", "axes.edgecolor": FAINT}
    with plt.rc_context(style):
        figure, (start, whole, end) = plt.subplots(1, 3, figsize=SIZE, width_ratios=(1, 2.2, 1))
        figure.subplots_adjust(left=0.035, right=0.985, top=0.83, bottom=0.125, wspace=0.11)
        _start(start, moments)
        _whole(whole, moments)
        _end(end, moments)
        _legend(figure)
        figure.text(0.02, 0.95, title, fontsize=15, fontweight="bold", color=INK, va="center")
        figure.text(0.02, 0.91, _summary(moments), fontsize=10, color=FAINT, va="center")
        for file in files:
            figure.savefig(file, dpi=DPI, facecolor="white")
        plt.close(figure)


def exposed_ms(moments: Moments) -> float:
    """Milliseconds from the end of the last layer's compute to the end of the last write: what compute did not hide."""
    return max(bar.end for bar in moments.written) - max(bar.end for bar in moments.computed)


def _summary(moments: Moments) -> str:
    return (
        f"{moments.pages} pages × {moments.num_layers} layers, {moments.bytes_written / 1e6:.1f} MB written by the "
        f"prefiller into the decoder.  Last write done {exposed_ms(moments):.1f} ms after the last layer was computed."
    )


def _start(axes: Any, moments: Moments) -> None:
    """From sending to the first layers, enlarged."""
    computed = [bar for bar in moments.computed if bar.layer < NUM_ENLARGED and bar.chunk == 0]
    written = [bar for bar in moments.written if bar.layer < NUM_ENLARGED and bar.chunk == 0]
    stop = computed[-1].end
    axes.axvspan(moments.at("reserved"), 2 * stop, color=HOLD, zorder=0)
    _bars(axes, computed, written, px_per_ms=300 / stop)
    axes.set_xlim(-0.05 * stop, 1.05 * stop)
    _frame(axes, range(NUM_ENLARGED), every=1, title=f"The first {NUM_ENLARGED} layers, enlarged")
    axes.set_ylabel("layer", color=INK)
    for index, what in enumerate(("received", "dispatched", "reserved", "sent")):
        _mark(axes, moments.at(what), f" {LABELS[what]}", NUM_ENLARGED - 1.5 + 0.26 * index, "left")


def _whole(axes: Any, moments: Moments) -> None:
    """The request from sending to its first token."""
    stop = moments.at("first token")
    axes.axvspan(moments.at("reserved"), moments.at("released"), color=HOLD, zorder=0)
    _bars(axes, moments.computed, moments.written, px_per_ms=700 / stop)
    axes.set_xlim(-0.02 * stop, stop * 1.02)
    _frame(axes, range(moments.num_layers), every=5, title="The whole request", head=2.2)
    axes.axvline(0.0, color=INK, lw=1)
    axes.axvline(stop, color=INK, lw=1)
    before = 0
    for index, (start, computed) in enumerate(moments.chunks):
        text = f" chunk {index + 1}\n {computed - before:,} tokens"
        # One that begins near the right edge reads leftwards.
        side = "right" if start > 0.8 * stop else "left"
        axes.text(start, -1.75, text, ha=side, va="center", color=CHUNK_INK, fontsize=9, fontweight="bold")
        before = computed


def _end(axes: Any, moments: Moments) -> None:
    """The last layers and what follows them, enlarged."""
    first_layer, last_chunk = moments.num_layers - NUM_ENLARGED, len(moments.chunks) - 1
    computed = [bar for bar in moments.computed if bar.layer >= first_layer and bar.chunk == last_chunk]
    start, stop = computed[0].start, moments.at("first token")
    written = [bar for bar in moments.written if bar.layer >= first_layer and bar.start >= start]
    margin = 0.05 * (stop - start)
    axes.axvspan(start - 2 * margin, moments.at("released"), color=HOLD, zorder=0)
    _bars(axes, computed, written, px_per_ms=300 / (stop - start))
    axes.set_xlim(start - margin, stop + margin)
    layers = range(first_layer, moments.num_layers)
    _frame(axes, layers, every=1, title=f"The last {NUM_ENLARGED} layers, enlarged")
    for index, what in enumerate(("first token", "released")):
        _mark(axes, moments.at(what), f"{LABELS[what]} ", first_layer - 0.5 + 0.26 * index, "right")


def _bars(axes: Any, computed: list[Bar], written: list[Bar], *, px_per_ms: float) -> None:
    """Compute above each layer's line, its write below; a write thinner than two pixels is drawn two pixels wide."""
    for bar in computed:
        axes.barh(bar.layer - ROW / 2, bar.end - bar.start, ROW, bar.start, color=COMPUTE[bar.chunk % 2], lw=0)
    thinnest = 2 / px_per_ms
    for bar in written:
        axes.barh(bar.layer + ROW / 2, max(bar.end - bar.start, thinnest), ROW, bar.start, color=WRITE, lw=0)


def _frame(axes: Any, layers: range, *, every: int, title: str, head: float = 0.0) -> None:
    """Rows for these layers, the first one on top, with room for `head` rows above it."""
    axes.set_ylim(layers.stop - 0.3, layers.start - 0.7 - head)
    axes.set_yticks([layer for layer in layers if layer % every == 0 or layer == layers.stop - 1])
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=8)
    axes.set_xlabel("milliseconds since the client sent the request", color=INK)
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(length=3, color=FAINT, labelcolor=INK)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="x", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(axes: Any, at: float, text: str, row: float, side: str) -> None:
    """A vertical line with its name beside it."""
    axes.axvline(at, color=INK, lw=1, zorder=4)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.2}
    axes.text(at, row, text, ha=side, va="center", fontsize=9, color=INK, bbox=box, zorder=5)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=COMPUTE[1], label="layer computed on the prefiller (shade: chunk)"),
        Patch(color=WRITE, label="its pages written into the decoder"),
        Patch(facecolor=HOLD, edgecolor=FAINT, lw=0.5, label="request held on the decoder"),
    ]
    figure.legend(handles=patches, loc="lower left", bbox_to_anchor=(0.012, 0.0), ncols=3, frameon=False, fontsize=9.5)
