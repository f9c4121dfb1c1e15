"""How many layers one write carries, from what posting, bytes and layers have taken so far. Pure.

Of `layers` layers with x seconds of bytes each, written to n transfers at p seconds of the writer for each write, k to
a write add to the first token

    share * n * p * layers / k   what the model thread loses to posting while it computes
    n * p + k * x                the last write, which follows the last layer

least at k = sqrt(share * n * p * layers / x). With c seconds of compute a layer, writes keep pace when
n * p + k * x <= k * c, so k is at least n * p / (c - x), unless bytes take longer than compute anyway.
"""

import math
from itertools import pairwise

KEPT = 0.97
"""Weight of a sample after the next one: about the last thirty count."""

SMALL = 1 << 18
"""Bytes of a write from which on its time is more the wire's than the post's."""

FASTEST = 1e-15
"""Seconds for a byte: no wire is faster."""

ANCHOR = 0.001
"""Weight of what was expected before anything was seen: only a tie-break between lines that fit all samples."""

MAX_SURPRISE = 4.0
"""A sample counts as at most so many times what was expected: a thread that was not scheduled teaches nothing."""


class CostLine:
    """Seconds as `fixed + size * per_unit`: least squares of relative errors, older samples weighing less.

    One thread adds, any may read `line`.

    Args:
        fixed: expected seconds at size 0, before anything was seen.
        per_unit: expected seconds for each unit of size.
        scale: a usual size. The expectation stays as two samples, at 0 and here, so that equal sizes determine a line.

    Attributes:
        line: (fixed, per_unit), neither of them negative.
    """

    def __init__(self, fixed: float, per_unit: float, scale: float) -> None:
        self.line = self._expected = (fixed, per_unit)
        self._sums: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._fold(0.0, fixed)
        self._fold(scale, fixed + scale * per_unit)
        w, wx, wy, wxx, wxy = self._sums
        self._anchors = (ANCHOR * w, ANCHOR * wx, ANCHOR * wy, ANCHOR * wxx, ANCHOR * wxy)
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def at(self, size: float) -> float:
        """Seconds expected for a size."""
        fixed, per_unit = self.line
        return fixed + size * per_unit

    def add(self, size: float, seconds: float) -> None:
        """Learn from one measurement. About 2 us: it stands between posts."""
        self._fold(size, min(max(seconds, 0.0), MAX_SURPRISE * self.at(size)))
        w, wx, wy, wxx, wxy = self._sums
        a, ax, ay, axx, axy = self._anchors
        self.line = _solve(w + a, wx + ax, wy + ay, wxx + axx, wxy + axy)

    def _fold(self, x: float, y: float) -> None:
        """Add to the sums of weight, w x, w y, w x x, w x y. The weight makes errors relative to what was expected."""
        fixed, per_unit = self._expected
        weight = 1 / (fixed + x * per_unit) ** 2
        w, wx, wy, wxx, wxy = self._sums
        self._sums = (
            KEPT * w + weight,
            KEPT * wx + weight * x,
            KEPT * wy + weight * y,
            KEPT * wxx + weight * x * x,
            KEPT * wxy + weight * x * y,
        )


class BestRate:
    """Seconds for each byte at the best that was seen lately: what slows a single write says nothing of the wire.

    One thread adds, any may read. Without samples as good it grows, a factor of e in about thirty.

    Args:
        per_unit: expected before anything was seen.
    """

    def __init__(self, per_unit: float) -> None:
        self.per_unit = per_unit

    def add(self, size: float, seconds: float) -> None:
        """Learn from one measurement; what a small write takes is the post's time and not the wire's."""
        if size >= SMALL:
            self.per_unit = max(min(seconds / size, self.per_unit / KEPT), FASTEST)


class Grain:
    """One rank's. The messenger adds to its lines, the model thread asks.

    Args:
        share: of a post's time that the model thread loses: 1 where both need the same cores.
        min_write_bytes: an operator's choice instead of a measured one: ready bytes that are worth a write. 0: none.

    Attributes:
        posting: the writer's CPU seconds to make one write, over its bytes.
        wire: seconds from a write's post to its end, for each of its bytes.
        layer: seconds of compute of one layer, over the bytes it makes ready.
    """

    def __init__(self, share: float, min_write_bytes: int = 0) -> None:
        self._share = share
        self._min_write_bytes = min_write_bytes
        self.posting = CostLine(100e-6, 0.0, 1e6)
        self.wire = BestRate(1 / 4e9)
        self.layer = CostLine(1e-3, 2e-9, 1e6)

    def layers_per_write(self, num_layers: int, layer_bytes: int, num_transfers: int) -> int:
        """From 1 to `num_layers`.

        Args:
            num_layers: of the rank.
            layer_bytes: that each layer of the step makes ready, over all transfers.
            num_transfers: among which they are divided.
        """
        if self._min_write_bytes:
            return min(num_layers, -(-self._min_write_bytes // max(layer_bytes, 1)))
        post_s = num_transfers * self.posting.line[0]
        bytes_s = max(layer_bytes, 1) * self.wire.per_unit
        best = round(math.sqrt(self._share * post_s * num_layers / bytes_s))
        spare_s = self.layer.at(layer_bytes) - bytes_s
        pace = math.ceil(post_s / spare_s) if spare_s > 0 else 1
        return min(num_layers, max(1, best, pace))


def portions(num_layers: int, size: int) -> list[range]:
    """Layers in order, at most `size` together, in as few and as equal portions as that takes; the largest first."""
    count = -(-num_layers // size)
    small, num_large = divmod(num_layers, count)
    starts = [index * small + min(index, num_large) for index in range(count + 1)]
    return [range(first, stop) for first, stop in pairwise(starts)]


def _solve(w: float, wx: float, wy: float, wxx: float, wxy: float) -> tuple[float, float]:
    """The line through weighted samples with both parts at least 0 (non-negative least squares of two unknowns)."""
    determinant = w * wxx - wx * wx
    fixed = (wy * wxx - wx * wxy) / determinant
    per_unit = (w * wxy - wx * wy) / determinant
    if fixed < 0:
        return 0.0, max(wxy / wxx, 0.0)
    if per_unit < 0:
        return max(wy / w, 0.0), 0.0
    return fixed, per_unit
