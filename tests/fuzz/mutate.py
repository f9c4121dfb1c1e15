"""Damage to bytes and to JSON values, decided by a random number generator, so that any case can be had again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

INTERESTING_BYTES = (
    b'\x00\x01\x7f\x80\x90\x91\x9f\xa0\xc0\xc1\xc4\xc6\xcb\xcc\xcf\xd3\xd9\xdb\xdc\xdd\xde\xdf\xff[{"\\u,'
)
INTERESTING = (
    None, True, False, 0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 1e308,
    float("inf"), float("nan"), "", "x", "\x00", "a" * 32, "a" * 33, "é", "\ud800", "http://h:1", [], {}, [[]],
    {"": {}},
)  # fmt: skip
MAX_MUTATIONS = 4


def damage(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A few flips, cuts, insertions, repetitions, splices."""
    buffer = bytearray(data)
    for _ in range(chance.randint(0, MAX_MUTATIONS)):
        at = chance.randrange(len(buffer) + 1)
        match chance.randrange(7):
            case 0 if at < len(buffer):
                buffer[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(buffer):
                buffer[at] = chance.choice(INTERESTING_BYTES)
            case 2:
                buffer[at:at] = bytes([chance.choice(INTERESTING_BYTES)]) * chance.choice((1, 1, 2, 8, 600))
            case 3:
                del buffer[at : at + chance.randint(1, 8)]
            case 4:
                del buffer[at:]
            case 5:
                buffer[at:at] = buffer[max(0, at - chance.randint(1, 16)) : at] * chance.randint(1, 3)
            case 6:
                other = chance.choice(others)
                buffer[at:] = other[chance.randrange(len(other) + 1) :]
    return bytes(buffer)


def any_value(chance: random.Random, depth: int = 3) -> Any:
    """Any JSON value, and some that only Python has."""
    if depth and chance.random() < 0.35:
        if chance.random() < 0.5:
            return [any_value(chance, depth - 1) for _ in range(chance.randrange(4))]
        return {chance.choice(("", "a", "prefiller", "protocol")): any_value(chance, depth - 1) for _ in range(2)}
    if chance.random() < 0.03:
        return nested(chance, chance.choice((15, 16, 17, 500, 3000)))
    return chance.choice(INTERESTING)


def nested(chance: random.Random, depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if chance.random() < 0.5 else {"k": value}
    return value


def distort(chance: random.Random, value: Any, keys: Sequence[str] = ()) -> Any:
    """A copy of a JSON value with something changed somewhere: replaced, dropped, added, repeated."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        copy = dict(value)
        key = chance.choice(list(copy))
        match chance.randrange(5):
            case 0:
                del copy[key]
            case 1:
                copy[chance.choice((*keys, "other", ""))] = any_value(chance)
            case _:
                copy[key] = distort(chance, copy[key])
        return copy
    if isinstance(value, list) and value and chance.random() < 0.8:
        copy_ = list(value)
        at = chance.randrange(len(copy_))
        match chance.randrange(5):
            case 0:
                del copy_[at]
            case 1:
                copy_.insert(at, copy_[at])
            case 2:
                copy_ *= chance.choice((2, 100))
            case _:
                copy_[at] = distort(chance, copy_[at])
        return copy_
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return value + chance.choice((-1, 1, 2**31, -(2**31), 2**62))
    return any_value(chance)
