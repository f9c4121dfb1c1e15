"""The compiled extension, or why there is none."""

from types import ModuleType
from typing import Any

_native: ModuleType | None
try:
    from vllm_pd_connector.kernels import _native  # type: ignore[attr-defined, no-redef]
except ImportError as error:  # built without a compiler, or for another Python
    _native = None
    WHY_MISSING = f"{error}; install with a C++20 compiler at hand"
else:
    WHY_MISSING = ""


def extension() -> Any:
    """The module `_native`.

    Raises:
        ImportError: it was not built; the text says why.
    """
    if _native is None:
        raise ImportError(WHY_MISSING)
    return _native


def is_built() -> bool:
    return _native is not None


def describe() -> str:
    """One phrase for logs and for setup: what of the compiled parts is here."""
    if _native is None:
        return f"no compiled extension ({WHY_MISSING})"
    return "compiled extension " + ("with CUDA kernels" if _native.has_cuda else "without CUDA kernels (no fit nvcc)")
