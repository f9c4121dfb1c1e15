"""A clock that moves when it is told to."""


class FakeClock:
    """Monotonic seconds; pass the object where a `clock` is asked for."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
