"""Deadlines by key, on whatever clock the caller passes. Pure."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline for each key; arming again replaces it. owned by: one thread."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0

    def arm(self, key: K, when: float) -> None:
        """Set the key's deadline, in seconds on the caller's clock."""
        self._when[key] = when
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, key))

    def disarm(self, key: K) -> None:
        self._when.pop(key, None)

    def expired(self, now: float) -> list[K]:
        """Keys whose deadline has passed, earliest first; they are disarmed."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heapq.heappop(self._heap)
            if self._when.get(key) == when:
                del self._when[key]
                due.append(key)
        return due

    def next_in(self, now: float) -> float | None:
        """Seconds until the earliest deadline, None without one."""
        while self._heap and self._when.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def __len__(self) -> int:
        return len(self._when)
