"""UCX uses the devices a rank was given, unless the operator named others. UCX reads them once for each process."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.transport.nixl import NixlTransport
try:
    NixlTransport("devices", devices=sys.argv[1:])
except UnsupportedEngine:
    print("refused")
else:
    print("started")
"""


@pytest.mark.parametrize(
    ("given", "operator", "outcome"),
    [
        ([], None, "started"),
        (["lo"], None, "started"),
        (["no_such_device:1"], None, "refused"),  # so what was given has an effect
        (["no_such_device:1"], "lo", "started"),
    ],
)
def test_given_devices(given: list[str], operator: str | None, outcome: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"}
    env |= {"UCX_NET_DEVICES": operator} if operator else {}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *given], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[-1] == outcome
