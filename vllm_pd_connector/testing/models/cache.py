"""Where built models are kept. A directory is either absent or complete, and named after its recipe."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


class ModelBuildError(RuntimeError):
    """A model could not be built. The message says what is missing and who can supply it."""


def cache_dir() -> Path:
    """`vllm-pd-connector` under `$XDG_CACHE_HOME` if that is an absolute path, else under `~/.cache`."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "vllm-pd-connector"


def cached_model(name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """The directory `models/NAME-HASH` of the cache, built if it is not there.

    Args:
        name: first part of the directory's name.
        recipe: everything that decides the content; another recipe is another directory.
        build: fills the empty directory it is given; what it raises goes on to the caller and leaves nothing.

    Threading: any number of threads and processes; those that start together build twice and keep one result.
    """
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    target = cache_dir() / "models" / f"{name}-{digest}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays on one file system and is atomic.
    work = Path(tempfile.mkdtemp(prefix=f".building-{name}-", dir=target.parent))
    try:
        build(work)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first: its result is the same
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target
