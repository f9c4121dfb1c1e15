"""Whether two greedy answers to one prompt are the same. Pure."""

from dataclasses import dataclass
from typing import Literal

from vllm_pd_connector.demo.client import Answer

TIE_NATS = 0.15
"""Two candidates closer than this are a toss-up in bfloat16, whose last place is 0.03 to 0.06 nats at these logits.

The decoder computes the last prompt token by itself, an ordinary server within the prompt: other sums, other rounding.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`same`: equal token ids; `tie`: they part where the ordinary server itself was undecided; else `different`."""

    kind: Literal["same", "tie", "different"]
    num_tokens: int
    num_equal: int
    largest_gap: float

    @property
    def text(self) -> str:
        """One line for the screen."""
        gap = f"log-probabilities within {self.largest_gap:.3f}"
        if self.kind == "same":
            return f"✓ the same {self.num_tokens} tokens as the ordinary server, {gap}"
        if self.kind == "tie":
            return (
                f"≈ the first {self.num_equal} tokens are the same ({gap}); there the ordinary server's two best "
                f"candidates were closer than bfloat16 can tell ({TIE_NATS} nats)"
            )
        return f"✗ DIFFERS from the ordinary server at token {self.num_equal + 1} of {self.num_tokens}, {gap}"


def compare(split: Answer, ordinary: Answer) -> Verdict:
    """How the split answer compares; the largest gap is over the equal tokens, in nats."""
    pairs = list(zip(split.token_ids, ordinary.token_ids, strict=False))
    num_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    gaps = [abs(a - b) for a, b in zip(split.logprobs[:num_equal], ordinary.logprobs[:num_equal], strict=False)]
    if split.token_ids == ordinary.token_ids:
        kind: Literal["same", "tie", "different"] = "same"
    else:
        kind = "tie" if num_equal < len(pairs) and _is_tie(split, ordinary, num_equal) else "different"
    return Verdict(
        kind=kind, num_tokens=len(ordinary.token_ids), num_equal=num_equal, largest_gap=max(gaps, default=0.0)
    )


def _is_tie(split: Answer, ordinary: Answer, place: int) -> bool:
    """Whether both servers had the same two candidates there, nearly equally likely."""
    if place >= min(len(split.top), len(ordinary.top)):
        return False
    here, there = split.top[place], ordinary.top[place]
    close = all(max(top.values()) - min(top.values()) < TIE_NATS for top in (here, there))
    return close and here.keys() == there.keys()
