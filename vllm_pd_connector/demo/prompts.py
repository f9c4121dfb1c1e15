"""What the demo asks. Pure: the same words on every machine."""

import random
from dataclasses import dataclass
from typing import Any, Literal

SHIPS = ("Aurora", "Belinda", "Caspian", "Dorothea", "Esperance", "Fortuna", "Galatea", "Halcyon")
CAPTAINS = ("Duarte", "Lindqvist", "Okafor", "Moreau", "Tanaka", "Hansen", "Petrova", "Ferreira")
PORTS = ("Lisbon", "Hamburg", "Genoa", "Bergen", "Cadiz", "Odessa", "Dublin", "Tunis", "Riga", "Valletta")
GOODS = ("tea", "cork", "salt", "copper", "lemons", "wool", "timber", "paper", "olive oil", "glass")
WINDS = ("north-west", "south", "east", "west", "north", "south-east")
SKIES = ("light rain", "clear sky", "morning fog", "heavy swell", "low cloud", "bright sun")
LONG_ENTRIES = 75
"""3,000 tokens of SmolLM2, 40 an entry."""
SHORT_ENTRIES = 25
WARM_UP_ENTRIES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request, without the model's name.

    Attributes:
        title: what it is, for the screen.
        kind: which endpoint.
        body: the endpoint's own fields.
    """

    title: str
    kind: Literal["completion", "chat"]
    body: dict[str, Any]


def sentence() -> Question:
    """A prompt shorter than a page."""
    return Question(
        title="One sentence",
        kind="completion",
        body={"prompt": "The capital of France is a city called", "max_tokens": 24},
    )


def long_document() -> Question:
    """A log of about 3,000 tokens and a question on it."""
    return _document("A 3,000-token document and a question", book=1, entries=LONG_ENTRIES, max_tokens=32)


def conversation() -> Question:
    """A chat that goes back and forth."""
    messages = [
        {"role": "user", "content": "I want to plant a small herb garden on my balcony. Which herbs are easy to grow?"},
        {"role": "assistant", "content": "Basil, mint, chives and parsley are all easy to grow in pots."},
        {"role": "user", "content": "How should I water the basil? Answer in two sentences."},
    ]
    return Question(title="A chat, streamed", kind="chat", body={"messages": messages, "max_tokens": 64})


def timed_documents() -> list[Question]:
    """Three logs of about 1,000 tokens that differ from their first words on, so that no prefix cache helps."""
    return [
        _document(f"Document {book - 1} of 3, 1,000 tokens", book=book, entries=SHORT_ENTRIES, max_tokens=4)
        for book in (2, 3, 4)
    ]


def warm_up() -> Question:
    """Touches every code path once; its answer is not looked at."""
    return _document("Warm-up", book=0, entries=WARM_UP_ENTRIES, max_tokens=4)


def _document(title: str, *, book: int, entries: int, max_tokens: int) -> Question:
    """Each book begins with another port, so that two never share a page."""
    dice = random.Random(book)
    lines = [f"{PORTS[book]} harbour, book {book}. Ships cleared in the year {1800 + book}:"]
    cargo = ""
    for day in range(1, entries + 1):
        ship, goods = dice.choice(SHIPS), f"{dice.randint(11, 99)} crates of {dice.choice(GOODS)}"
        lines.append(
            f"Day {day}. The brig {ship}, Captain {dice.choice(CAPTAINS)}, left {dice.choice(PORTS)} for "
            f"{dice.choice(PORTS)} with {goods}; wind from the {dice.choice(WINDS)}, {dice.choice(SKIES)}."
        )
        cargo = f"the {ship}"
    lines.append(f"\nWhat did {cargo} carry on day {entries}, and who was its captain?")
    messages = [{"role": "user", "content": "\n".join(lines)}]
    return Question(title=title, kind="chat", body={"messages": messages, "max_tokens": max_tokens})
