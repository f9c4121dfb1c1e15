"""Python runs this at its start when `testing.machine` puts its folder on PYTHONPATH: vLLM's V2 model runner on a CPU.

The V2 runner's own kernels are Triton's, and Triton has no CPU backend here; its interpreter runs the same kernels in
NumPy. vLLM asks whether a backend called "cpu" is there, and then uses them. Only the worker's process needs more than
the answer, see `second_runner_worker.py`.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True)))
