"""Any `kv_connector_extra_config` gives a configuration or a ConfigError that names the path of the key."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.config import ROOT, PDConfig, parse
from vllm_pd_connector.errors import ConfigError

KEYS = sorted(field.name for field in msgspec.structs.fields(PDConfig))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
urls = st.lists(st.text("htps:/[]@?#.019a", max_size=16) | st.just("http://10.0.0.7:8100/"), max_size=3)


def parse_or_refusal(extra: dict[str, Any]) -> tuple[PDConfig | None, str]:
    try:
        return parse(extra), ""
    except ConfigError as error:
        return None, str(error)


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=10), values | urls, max_size=3))
def test_any_dictionary_parses_or_names_the_path(extra: dict[str, Any]) -> None:
    config, refusal = parse_or_refusal(extra)
    if config is None:
        assert any(f"{ROOT}.{key}" in refusal for key in extra)
        return
    assert isinstance(config, PDConfig)
    for key in ("request_deadline_s", "settle_s", "fence_s", "quarantine_s", "connect_timeout_s", "retry_s"):
        assert 0 < getattr(config, key) <= 86_400
    assert 0 < config.poll_pause_s <= 0.1


@given(urls)
def test_any_prefiller_list_parses_or_names_the_entry(prefillers: list[str]) -> None:
    config, refusal = parse_or_refusal({"prefillers": prefillers})
    if config is None:
        assert f"{ROOT}.prefillers[" in refusal
        return
    assert all(url.startswith("http") and not url.endswith("/") for url in config.prefillers)


@pytest.mark.parametrize("url", ["http://[", "http://[::1", "http://host:99999", "http://host:x"])
def test_a_url_that_cannot_be_split_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"prefillers\[0\]"):
        parse({"prefillers": [url]})


@pytest.mark.parametrize("key", ["request_deadline_s", "settle_s", "fence_s", "quarantine_s", "poll_pause_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1])
def test_a_time_that_is_no_duration_is_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        parse({key: value})


@given(st.fixed_dictionaries({}, optional={"min_remote_tokens": st.integers(1, 10**6), "settle_s": st.floats(1, 100)}))
def test_allowed_values_are_taken_as_given(extra: dict[str, Any]) -> None:
    config = parse(extra)
    assert all(getattr(config, key) == value for key, value in extra.items())


def test_a_word_that_is_no_text_is_refused_by_its_path() -> None:
    _, refusal = parse_or_refusal({"on_failure": "\ud800"})
    assert f"{ROOT}.on_failure" in refusal
