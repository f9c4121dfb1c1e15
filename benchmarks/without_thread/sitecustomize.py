"""Python runs this at its start when `sessions` puts its folder on PYTHONPATH: NIXL agents without a progress thread.

vLLM's NixlConnector has no setting for it, and the thread takes a whole core: pinned to one, the model runs at a third.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Finder(MetaPathFinder):
    """Finds nothing itself: changes a default of `nixl_agent_config` once NIXL's own module has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.rpartition(".")
        if module != "_api" or not package.startswith("nixl_"):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(loaded: ModuleType) -> None:
                load(loaded)
                begin = loaded.nixl_agent_config.__init__

                def without_thread(config: Any, *args: Any, **kwargs: Any) -> None:
                    begin(config, *args, **({} if args else {"enable_prog_thread": False}) | kwargs)

                loaded.nixl_agent_config.__init__ = without_thread

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign, assignment]
        return spec


sys.meta_path.insert(0, Finder())
