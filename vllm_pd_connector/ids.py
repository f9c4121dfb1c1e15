"""Distinct types for the identities that must never be mixed up. Pure: imports nothing but typing."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""vLLM's internal request id. Differs between prefiller and decoder; never sent to a peer."""

TransferId = NewType("TransferId", str)
"""32 hex digits from the operating system's random source; one per dispatched sample (law 11)."""

EngineId = NewType("EngineId", str)
"""vLLM's `engine_id`: stable across restarts when the operator sets it."""

Generation = NewType("Generation", str)
"""16 hex digits drawn when a process starts: the same address with another generation is another peer."""

Rank = NewType("Rank", int)
"""Tensor-parallel rank of a worker within its engine."""

BlockId = NewType("BlockId", int)
"""vLLM block number in one engine's pool. 0 is the null block and never moves."""
