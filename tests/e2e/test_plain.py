"""What the connector leaves alone: servers without prefillers, tenants' caches, an idle machine, a mistyped setting."""

from pathlib import Path

import pytest
from server_tier.ask import Score, ask, at_once
from server_tier.fixtures import SUMMARY, Pair
from server_tier.probe import Since, idle_cores, vllm_metric, wait_quiet
from server_tier.prompts import RANDOM, names
from server_tier.reference import IDLE_S, Reference
from server_tier.stage import FLOAT32

from vllm_pd_connector.testing.models import random_llama
from vllm_pd_connector.testing.servers import Server, ServerFailed, ServerSpec, start_all

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


def test_a_decoder_without_prefillers_is_an_ordinary_server(
    both_servers: list[Server], random_reference: Reference, score: Score
) -> None:
    """Also: the connector is found by `kv_connector_module_path`."""
    alone = both_servers[2]
    for name in names("small"):
        score.compare(name, ask(alone.url, RANDOM[name]), random_reference.answers[name])
    assert not any(alone.metrics().values())
    assert "event=pages_registered" in alone.log_text()
    score.check()


def test_kv_both_servers_prefill_for_each_other(
    both_servers: list[Server], random_reference: Reference, score: Score
) -> None:
    first, second, _ = both_servers
    for server, peer in ((first, second), (second, first)):
        server.wait_log(f"event=prefiller_greeted prefiller={peer.url}", 30)
    sinces = [Since(first), Since(second)]
    kinds = names("small")

    def ask_peerwise(server: Server, peer: Server) -> list[tuple[str, object]]:
        pool = {"prefiller": peer.url}
        return [
            (name, ask(server.url, RANDOM[name], kv_transfer_params=pool, cache_salt=f"from {server.port}"))
            for name in kinds
        ]

    both_ways = at_once([lambda: ask_peerwise(first, second), lambda: ask_peerwise(second, first)])
    for name, answer in both_ways[0] + both_ways[1]:
        score.compare(name, answer, random_reference.answers[name])
    for since in sinces:
        assert since("dispatched", "released", "failed") == [len(kinds), len(kinds), 0]
        assert since("pages_written", "pages_arrived")[0] > 0
    wait_quiet(first, second)
    score.check()


def test_tenants_do_not_share_pages_on_the_prefiller(main_pair: Pair) -> None:
    prompt = RANDOM[names("warm")[0]]

    def hits_after(url: str, salt: str) -> float:
        before = vllm_metric(main_pair.prefiller, "vllm:prefix_cache_hits_total")
        ask(url, prompt, cache_salt=salt)
        return vllm_metric(main_pair.prefiller, "vllm:prefix_cache_hits_total") - before

    since = Since(main_pair.decoder)
    assert hits_after(main_pair.decoder.url, "tenant one") == 0
    assert hits_after(main_pair.decoder.url, "tenant two") == 0
    assert since("released") == [2]
    # The control: the same tenant does find its pages there.
    assert hits_after(main_pair.prefiller.url, "tenant one") > 0


def test_idle_servers_use_no_cpu(main_pair: Pair, random_reference: Reference) -> None:
    """Not more than without the connector; a stock NIXL agent's progress thread burns a core for each rank (law 15)."""
    wait_quiet(main_pair.decoder, main_pair.prefiller)
    used = at_once([lambda s=server: idle_cores(s, IDLE_S) for server in (main_pair.prefiller, main_pair.decoder)])
    plain = random_reference.idle_cores
    SUMMARY.append(
        f"idle cores over {IDLE_S:g} s: prefiller {used[0]:.4f}, decoder {used[1]:.4f}, ordinary server {plain:.4f}"
    )
    assert max(used) - plain < 0.1


def test_a_mistyped_setting_stops_the_server(tmp_path: Path) -> None:
    spec = ServerSpec(random_llama(), "decoder", cores=[0, 1], name="typo", args=FLOAT32, extra={"prefilers": []})
    with pytest.raises(ServerFailed, match="ended with status"), start_all([spec], 120, log_dir=tmp_path):
        pass
    refusal = "kv_connector_extra_config.prefilers is not a key of this connector. Known keys: "
    known = (tmp_path / "typo.log").read_text().partition(refusal)[2].splitlines()[0]
    assert "prefillers, " in known
