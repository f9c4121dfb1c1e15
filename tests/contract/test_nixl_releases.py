"""A NIXL that is too old is refused by name; what tries other releases works on the installed one."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from nixl_releases.release import Release

from vllm_pd_connector.errors import UnsupportedEngine

pytestmark = pytest.mark.nixl
nixl = pytest.importorskip("vllm_pd_connector.transport.nixl")

PYPROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"


@pytest.mark.parametrize("found", ["0.10.1", "1.4.1"])
def test_an_older_release_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(nixl, "version", lambda _package: found)
    with pytest.raises(UnsupportedEngine, match=rf"nixl-cu\d+ {found} is installed.*pip install 'nixl>=1.5'"):
        nixl.NixlTransport("old")


@pytest.mark.parametrize("found", ["1.5.0", "1.5.0rc1", "1.6rc1", "1.10.0", "2.0.0"])
def test_a_newer_one_is_not(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(nixl, "version", lambda _package: found)
    nixl.check_release()


def test_one_built_from_source_has_no_version_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(nixl, "version", version)
    nixl.check_release()


def test_what_is_installed_with_the_package_is_what_it_checks_for() -> None:
    wants = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert f"nixl>={'.'.join(map(str, nixl.MIN_NIXL))}" in wants


@pytest.mark.slow
def test_the_installed_release_writes_to_itself() -> None:
    assert Release().writes_to(Release()) == "ok"
