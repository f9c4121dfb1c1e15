"""How a thread that knows no Python selects a GPU: CUDA's driver by its C functions, without a header or a link.

The primary context is the one that PyTorch and the CUDA runtime use.
"""

import ctypes
from typing import Any

from vllm_pd_connector.errors import UnsupportedEngine

DRIVER = "libcuda.so.1"


def primary_context(ordinal: int, driver: str = DRIVER) -> tuple[int, int]:
    """A C function that makes a context current on the thread that calls it, and a GPU's primary context for it.

    The context is kept for the rest of the process.

    Args:
        ordinal: of the GPU among those this process sees, as in `torch.device("cuda", ordinal)`.
        driver: the driver's library.

    Raises:
        UnsupportedEngine: there is no driver, or it refuses.
    """
    try:
        library = ctypes.CDLL(driver)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _call(library.cuInit, ctypes.c_uint(0))
        _call(library.cuDeviceGet, ctypes.byref(device), ctypes.c_int(ordinal))
        _call(library.cuDevicePrimaryCtxRetain, ctypes.byref(context), device)
        select = ctypes.cast(library.cuCtxSetCurrent, ctypes.c_void_p).value
    except (OSError, AttributeError) as error:  # no library, or not with these functions
        raise UnsupportedEngine(f"CUDA's driver cannot be used: {error}") from error
    return select or 0, context.value or 0


def _call(function: Any, *arguments: object) -> None:
    code = function(*arguments)
    if code:
        raise UnsupportedEngine(f"{function.__name__} of CUDA's driver returned {code}")
