"""The picture of one long request: each layer's compute and write, and the moments around them."""

from pathlib import Path
from typing import Any

from vllm_pd_connector.demo.moments import Bar, Moments

COMPUTE = ("#9db7d5", "#7d9dc4")  # chunks take turns, so that they are told apart
WRITE = "#d9541e"
HOLD = "#f3efe6"
INK = "#2b2b2b"
FAINT = "#8a8a8a"
ROW = 0.4  # height of a bar; compute lies above its layer's line, write below
LABELS = {
    "sent": "sent",
    "reserved": "pages reserved,\nrequest held",
    "dispatched": "dispatched",
    "received": "received",
    "released": "released",
    "first token": "first token",
}
NUM_LAST_LAYERS = 6
SIZE = (13.5, 7.2)  # inches
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
        figure, (whole, end) = plt.subplots(1, 2, figsize=SIZE, width_ratios=(2.3, 1), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04)
        _whole(whole, moments)
        _end(end, moments)
        figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)
        figure.text(0.013, 0.935, _summary(moments), fontsize=9.5, color=FAINT, va="center")
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


def _whole(axes: Any, moments: Moments) -> None:
    """The request from sending to its first token."""
    stop = moments.at("first token")
    axes.axvspan(moments.at("reserved"), moments.at("released"), color=HOLD, zorder=0)
    _bars(axes, moments.computed, moments.written, px_per_ms=900 / stop)
    axes.set_xlim(-0.02 * stop, stop * 1.03)
    _rows(axes, range(moments.num_layers), every=5)
    axes.set_xlabel("milliseconds since the client sent the request")
    axes.set_ylabel("layer")
    before = 0
    for index, (start, computed) in enumerate(moments.chunks):
        bars = [bar for bar in moments.computed if bar.chunk == index]
        end = max((bar.end for bar in bars), default=start)
        axes.annotate(
            f"chunk {index + 1}: {computed - before:,} tokens",
            ((start + end) / 2, moments.num_layers + 0.1),
            ha="center", va="top", color=COMPUTE[1], fontsize=8.5, fontweight="bold", annotation_clip=False,
        )  # fmt: skip
        before = computed
    _mark(axes, [(0.0, "sent to held,\ndispatched"), (moments.at("released"), "released,\nfirst token")], -1.6)
    _legend(axes)


def _end(axes: Any, moments: Moments) -> None:
    """The last layers and what follows them, enlarged."""
    first_layer = moments.num_layers - NUM_LAST_LAYERS
    last_chunk = len(moments.chunks) - 1
    computed = [b for b in moments.computed if b.layer >= first_layer and b.chunk == last_chunk]
    written = [b for b in moments.written if b.layer >= first_layer and b.start >= computed[0].start]
    start, stop = computed[0].start, moments.at("first token")
    margin = 0.06 * (stop - start)
    axes.axvspan(start - margin, moments.at("released"), color=HOLD, zorder=0)
    _bars(axes, computed, written, px_per_ms=400 / (stop - start))
    axes.set_xlim(start - margin, stop + margin)
    _rows(axes, range(first_layer, moments.num_layers), every=1)
    axes.set_xlabel("milliseconds")
    axes.set_title(f"The last {NUM_LAST_LAYERS} layers, enlarged", fontsize=9.5, color=INK, loc="left", pad=34)
    _mark(axes, [(moments.at(what), LABELS[what]) for what in ("released", "first token")], first_layer - 0.72)


def _bars(axes: Any, computed: list[Bar], written: list[Bar], *, px_per_ms: float) -> None:
    """Compute above each layer's line, its write below; a write thinner than two pixels is drawn two pixels wide."""
    for bar in computed:
        axes.barh(bar.layer - ROW / 2, bar.end - bar.start, ROW, bar.start, color=COMPUTE[bar.chunk % 2], lw=0)
    thinnest = 2 / px_per_ms
    for bar in written:
        axes.barh(bar.layer + ROW / 2, max(bar.end - bar.start, thinnest), ROW, bar.start, color=WRITE, lw=0)


def _rows(axes: Any, layers: range, *, every: int) -> None:
    axes.set_ylim(layers.stop - 0.3, layers.start - 0.7)
    ticks = [layer for layer in layers if layer % every == 0 or layer == layers.stop - 1]
    axes.set_yticks(ticks)
    axes.tick_params(length=3, color=FAINT, labelcolor=INK)
    axes.grid(axis="x", color="#e8e8e8", lw=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(axes: Any, marks: list[tuple[float, str]], top: float) -> None:
    """Vertical lines with their names above the axes."""
    for at, text in marks:
        axes.axvline(at, color=INK, lw=1, zorder=4)
        axes.annotate(text, (at, top), ha="center", va="bottom", fontsize=8.5, color=INK, annotation_clip=False)


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=COMPUTE[1], label="layer computed on the prefiller"),
        Patch(color=WRITE, label="its pages written into the decoder"),
        Patch(facecolor=HOLD, edgecolor=FAINT, lw=0.5, label="request held on the decoder"),
    ]
    axes.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(0, -0.09), ncols=3, frameon=False, fontsize=9,
        handlelength=1.2,
    )  # fmt: skip
