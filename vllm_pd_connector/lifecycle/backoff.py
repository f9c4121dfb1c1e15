"""How long to leave a busy prefiller alone. Pure; the caller throws the dice."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


def pause_s(attempt: int, *, retry_after_s: float | None, dice: float) -> float:
    """Seconds until a prefiller that was busy is asked again.

    What it asked for itself is kept and spread upwards by a tenth, so that decoders that were refused together do not
    come back together. Otherwise the pause doubles with each attempt and is spread over its upper half.

    Args:
        attempt: 0 after the first refusal.
        retry_after_s: its `Retry-After`, None without one.
        dice: evenly spread over 0..1.
    """
    if retry_after_s is not None:
        return retry_after_s * (1 + dice / 10)
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt, 16)) * (1 + dice) / 2
