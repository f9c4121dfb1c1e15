"""The rooms keep their walls: what each may import, which way imports point, how large files and functions may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_pd_connector

PACKAGE = "vllm_pd_connector"
ROOT = Path(vllm_pd_connector.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
PURE = ["ids.py", "errors.py", "config.py", "geometry", "plan", "lifecycle", "wire", "topology"]
PURE += ["doctor/finding.py", "doctor/machine.py", "doctor/pair.py"]
FORBIDDEN_IN_PURE = {"torch", "vllm", "nixl", "zmq", "aiohttp", "threading", "asyncio", "time", "os", "socket"}
ORDER = [
    "errors",
    "ids",
    "topology",
    "geometry",
    "plan",
    "lifecycle",
    "wire",
    "config",
    "telemetry",
    "kernels",
    "transport",
    "control",
]
"""A room may import those before it. `engine` and what stands beside it may import them all."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BLANKET_EXCEPTS = {"control/dispatcher.py": 2, "engine/messenger.py": 1}
"""Places where everything is caught on purpose; each says why in a comment."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything a module imports, at any depth, except under TYPE_CHECKING."""
    pending: list[ast.AST] = [tree_of(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def importers(library: str) -> set[str]:
    return {relative(p) for p in MODULES if any(name.split(".")[0] == library for name in imports(p))}


def is_in(path: Path, rooms: list[str]) -> bool:
    return any(relative(path) == room or relative(path).startswith(f"{room}/") for room in rooms)


@pytest.mark.parametrize("path", [p for p in MODULES if is_in(p, PURE)], ids=relative)
def test_pure_rooms_know_no_engine_network_thread_or_clock(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & FORBIDDEN_IN_PURE


def test_only_the_engine_room_and_the_plugin_import_vllm() -> None:
    strangers = {name for name in importers("vllm") if not name.startswith(("engine/", "testing/", "bench/", "demo"))}
    assert strangers <= {"plugin.py"}


def test_only_the_nixl_transport_imports_nixl() -> None:
    assert importers("nixl") == {"transport/nixl.py"}


@pytest.mark.parametrize(
    "path", [p for p in MODULES if relative(p).split("/")[0].removesuffix(".py") in ORDER], ids=relative
)
def test_imports_point_one_way(path: Path) -> None:
    room = relative(path).split("/")[0].removesuffix(".py")
    seen = {name.split(".")[1] for name in imports(path) if name.startswith(f"{PACKAGE}.")}
    later = {name for name in seen if name not in ORDER or ORDER.index(name) > ORDER.index(room)}
    assert not later, f"{relative(path)} imports from {later}"


def test_no_two_modules_import_each_other() -> None:
    graph = {
        f"{PACKAGE}.{relative(p)[:-3].replace('/', '.')}".removesuffix(".__init__"): set(imports(p)) for p in MODULES
    }
    edges = {
        module: {
            other for other in graph if other != module and any(n == other or n.startswith(f"{other}.") for n in names)
        }
        for module, names in graph.items()
    }
    leaves = {m: {o for o in out if not any(x != o and x.startswith(f"{o}.") for x in out)} for m, out in edges.items()}
    while done := {module for module, out in leaves.items() if not out & leaves.keys()}:
        leaves = {module: out for module, out in leaves.items() if module not in done}
    assert not leaves, f"imports run in a circle among {sorted(leaves)}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{relative(path)}:{node.lineno} {node.name} has {length} lines"


def test_everything_is_caught_only_where_it_is_known() -> None:
    found: dict[str, int] = {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = "BaseException" if node.type is None else ast.unparse(node.type)
                if {"Exception", "BaseException"} & set(caught.replace("(", "").replace(")", "").split(", ")):
                    found[relative(path)] = found.get(relative(path), 0) + 1
    core = {name: n for name, n in found.items() if not name.startswith(("bench/", "testing/", "demo"))}
    assert core == BLANKET_EXCEPTS


def test_the_environment_is_not_read() -> None:
    readers = {
        relative(path)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    # Tools that start processes pass an environment on; what runs inside vLLM reads none.
    readers = {name for name in readers if not name.startswith(("testing/", "bench/", "demo", "doctor/"))}
    assert readers == {"transport/nixl.py"}  # UCX takes its list of devices from there and nowhere else


def test_the_package_imports_without_vllm_nixl_and_torch() -> None:
    script = f"""
import sys
for name in ("vllm", "nixl", "torch", "zmq", "aiohttp"):
    sys.modules[name] = None
import {PACKAGE}, {PACKAGE}.plugin, {PACKAGE}.config, {PACKAGE}.transport.memory, {PACKAGE}.transport.scripted
import {PACKAGE}.wire.codec, {PACKAGE}.wire.transfer_params, {PACKAGE}.lifecycle.completion, {PACKAGE}.plan.write
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
