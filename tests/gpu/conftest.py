"""One GPU with torch and the NIXL wheel is enough; without one every test here is skipped with the reason."""

import pytest
import torch

from vllm_pd_connector.kernels import device_launch, native


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def why_not() -> str:
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not native.is_built():
        return native.WHY_MISSING
    return "" if device_launch.is_available() else "no CUDA kernels: neither nvcc at installation nor cupy"
