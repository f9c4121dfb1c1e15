"""Shared by all tiers. Hypothesis runs the same examples every time in the fast tier, without a time limit for each."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fast", max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=2_000, deadline=None)
settings.load_profile("fast")

pytest_plugins = ["server_tier.fixtures"]
