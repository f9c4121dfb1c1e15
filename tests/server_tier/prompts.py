"""Every prompt a test compares with the reference, by name, so that the reference answers each once and is stopped."""

from __future__ import annotations

import random
from collections.abc import Iterable

ALONE = (1, 2, 31, 32, 33, 500, 2000, 7900)
AT_ONCE = (1, 2, 31, 32, 33, 64, 100, 300, 500, 500, 700, 1000, 1500, 2000, 2000, 7900)
SHARED_PREFIX_TOKENS = 512
TAILS = (1, 20, 33, 300)
LONG = 3
LONG_TOKENS = 6000
SMOLLM_AT_ONCE = (1, 2, 31, 32, 33, 40, 50, 64, 64, 65, 80, 96, 100, 150, 200, 300)
BFLOAT16_ALONE = (1, 2, 32, 33, 500, 1500)
BFLOAT16_AT_ONCE = (2, 33, 100, 200, 300, 400)
SHAPE = (2, 33, 300, 700)
FOUR = (40, 150, 300, 400)


def tokens(number: int, seed: object, below: int = 500) -> list[int]:
    """Random token ids, clear of special ones."""
    chance = random.Random(str(seed))
    return [chance.randrange(10, below) for _ in range(number)]


def _named(kind: str, lengths: Iterable[int], below: int = 500) -> dict[str, list[int]]:
    return {f"{kind}-{i}-{n}": tokens(n, f"{kind} {i}", below) for i, n in enumerate(lengths)}


_PREFIX = tokens(SHARED_PREFIX_TOKENS, "shared prefix")

RANDOM: dict[str, list[int]] = {
    **_named("alone", ALONE),
    **_named("once", AT_ONCE),
    **{f"prefix-{n}": _PREFIX + tokens(n, f"tail {n}") for n in TAILS},
    **_named("warm", (500, 2000)),
    **_named("small", (40, 150, 300, 400)),
    **_named("long", [LONG_TOKENS] * LONG),
    **_named("shape", SHAPE),
    **_named("four", FOUR),
}
"""For the random Llama."""

SMOLLM: dict[str, list[int]] = {
    **_named("alone", ALONE, 49_000),
    **_named("once", SMOLLM_AT_ONCE, 49_000),
}
"""For SmolLM2 in float32."""

BFLOAT16: dict[str, list[int]] = {
    **_named("alone", BFLOAT16_ALONE, 49_000),
    **_named("once", BFLOAT16_AT_ONCE, 49_000),
}
"""For SmolLM2 in bfloat16, where rounding makes long comparisons a matter of luck."""


def names(kind: str, prompts: dict[str, list[int]] = RANDOM) -> list[str]:
    """Names of one kind, in order."""
    return [name for name in prompts if name.startswith(kind + "-")]
