"""Names of everything counted, and a thread-safe tally that is emptied into vLLM's stats each step."""

import threading
from collections import Counter

COUNTERS: dict[str, str] = {
    "dispatched": "Requests dispatched to a prefiller.",
    "retried": "Further attempts with another prefiller after one had failed.",
    "waited": "Requests that found no room and were passed over until there was some or `busy_wait_s` was over.",
    "released": "Requests whose pages all arrived.",
    "prefilled_locally": "Requests for which a prefiller was configured but that were prefilled on the decoder.",
    "failed": "Remote prefills given up, whatever the reason.",
    "tokens_kept": "Prompt tokens of failed attempts whose pages had arrived and were kept in the prefix cache.",
    "aborted": "Requests whose client left while they were held.",
    "refused_params": "Requests refused for their kv_transfer_params.",
    "pages_written": "Pages, or parts of pages, written to decoders.",
    "descriptors_written": "Contiguous pieces those were made of; adjacent pages are merged by NIXL.",
    "bytes_written": "Bytes written to decoders.",
    "writes": "Writes posted.",
    "write_failures": "Writes that failed.",
    "writes_stuck": "Writes that the transport has not ended for 10 seconds; their pages wait for it.",
    "layers_unannounced": "Layers of steps with transfers that no hook announced; their pages left at the step's end.",
    "transfers_cancelled": "Transfers stopped on the prefiller before their last page.",
    "preemption_waits": "Steps that waited for writes of preempted pages.",
    "preemption_wait_us": "Microseconds these steps waited, in all.",
    "pages_arrived": "Pages, or parts of pages, counted on this decoder.",
    "pages_verified": "Pages, or parts of pages, whose digest matched after arrival.",
    "pages_mismatched": "Pages whose digest did not match: the transfer was failed.",
    "notes_late": "Notifications for transfers that were already over.",
    "notes_duplicate": "Notifications received twice.",
    "notes_refused": "Notifications that could not be decoded or counted more than was expected.",
    "fences_lifted": "Page sets given back because every prefiller rank confirmed that it is quiet.",
    "fences_expired": "Page sets given back because a quarantine ended without confirmation.",
}
"""Counter name to help text; exported as `vllm:pd_<name>_total`."""

GAUGES: dict[str, str] = {
    "held_requests": "Requests held for a prefiller.",
    "held_pages": "Blocks reserved for held requests.",
    "fenced_pages": "Blocks kept from reuse until their writers are known to be quiet.",
    "draining_requests": "Prefills whose blocks wait for posted writes to finish.",
    "prefillers_usable": "Prefillers that greeted this decoder and have not been lost since.",
}
"""Gauge name to help text; exported as `vllm:pd_<name>`."""


METRIC_PREFIX = "vllm:pd_"


class Tally:
    """Counts since the last `take`. Any thread may add; one thread takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Raise a counter of `COUNTERS`."""
        with self._lock:
            self._counts[name] += amount

    def add_all(self, **amounts: int) -> None:
        """Raise several at once."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def take(self) -> dict[str, int]:
        """The counts so far; they start again from zero. Cheap when nothing was counted."""
        if not self._counts:
            return {}
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


def parse_metrics(text: str) -> dict[str, float]:
    """The connector's samples of a Prometheus page, summed over their labels; names as above.

    Raises:
        ValueError: a sample is no number.
    """
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(METRIC_PREFIX):
            continue
        name = line.removeprefix(METRIC_PREFIX).partition("{")[0].partition(" ")[0]
        if name.endswith("_created"):
            continue  # when the counter was made, not a count
        name = name.removesuffix("_total")
        sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums
