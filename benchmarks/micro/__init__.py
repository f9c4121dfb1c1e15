"""Costs of single operations, in nanoseconds, on one pinned core. The hook's part imports vLLM."""
