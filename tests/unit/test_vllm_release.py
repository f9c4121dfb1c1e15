"""Only releases of vLLM that this package was tried on are served."""

import pytest

from vllm_pd_connector.engine import vllm_compat
from vllm_pd_connector.errors import UnsupportedEngine


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1+cpu", "0.33", "0.33rc1", "0.33.2.dev7+g1a2b3c"])
def test_a_supported_release_is_named(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(vllm_compat, "version", lambda _package: found)
    assert vllm_compat.check_version() == found


@pytest.mark.parametrize("found", ["0.9.2", "0.31.9", "0.34.0rc1", "0.34", "1.0"])
def test_another_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(vllm_compat, "version", lambda _package: found)
    with pytest.raises(UnsupportedEngine, match=rf"vLLM {found} is installed.*vllm>=0.32,<0.34"):
        vllm_compat.check_version()
