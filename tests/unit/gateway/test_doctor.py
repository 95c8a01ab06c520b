"""`penstock doctor`: what it makes of an engine's words, of a configuration, and of the checklist before production."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway import cli
from gateway.config import Config
from gateway.doctor.checklist import Fleet, Member, points
from gateway.doctor.engine import judge, kind_of
from gateway.doctor.findings import Verdict
from gateway.doctor.probe import Probed, Said
from policies.model import Endpoint, EngineKind, Layout
from tests.chaos.house import house

METRICS = b"""vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.1
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0
"""


def said(value: Any = None, status: int = 200, text: bytes = b"") -> Said:
    return Said(status, value, text, 0.01)


def well(**more: Any) -> Probed:
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    facts = {
        "health": said(),
        "version": said({"version": "0.11.0"}),
        "models": said({"data": [{"id": "m", "max_model_len": 8192}]}),
        "metrics": said(text=METRICS),
        "token": said({"usage": usage, "choices": [{"token_ids": [7]}]}),
        "connections": 1,
        "skew_s": 0.4,
    }
    return Probed("http://gpu1:8000", **(facts | more))


def endpoint(**more: Any) -> Endpoint:
    return Endpoint(**({"name": "g", "url": "http://gpu1:8000", "pool": "chat", "served_model": ""} | more))


def judged(found: Probed, of: Endpoint | None = None, split: bool = False) -> dict[str, Verdict]:
    return {each.check: each.verdict for each in judge(found, of or endpoint(), frozenset({"m"}), split=split)}


def test_an_engine_that_is_well_passes_everything() -> None:
    assert set(judged(well()).values()) == {Verdict.PASS}


@pytest.mark.parametrize(
    ("told", "check", "verdict"),
    [
        ({"problem": "ConnectionRefusedError"}, "reachable", Verdict.FAIL),
        ({"health": said(status=401)}, "reachable", Verdict.FAIL),
        ({"health": said(status=503)}, "reachable", Verdict.FAIL),
        ({"version": said(status=404)}, "version", Verdict.UNKNOWN),
        ({"models": said({"data": [{"id": "other"}]})}, "models", Verdict.FAIL),
        ({"models": said([1])}, "models", Verdict.FAIL),
        ({"metrics": said(status=404)}, "metrics", Verdict.WARN),
        ({"metrics": said(text=b"vllm:num_requests_running 1\n")}, "metrics", Verdict.WARN),
        ({"metrics": said(text=b"sglang:num_running_reqs 1\n")}, "metrics", Verdict.FAIL),
        ({"token": said(status=500)}, "one token", Verdict.FAIL),
        ({"token": said({"usage": {}, "choices": [{}]})}, "usage details", Verdict.WARN),
        ({"token": said({"usage": None, "choices": None})}, "token ids", Verdict.UNKNOWN),
        ({"connections": 4}, "keep-alive", Verdict.WARN),
        ({"skew_s": -7.0}, "clock", Verdict.WARN),
        ({"skew_s": 3600.0}, "clock", Verdict.FAIL),
        ({"skew_s": None}, "clock", Verdict.UNKNOWN),
    ],
)
def test_each_thing_that_is_wrong_is_told_with_what_to_do(told: dict[str, Any], check: str, verdict: Verdict) -> None:
    found = judge(well(**told), endpoint(), frozenset({"m"}), split=False)
    match = next(each for each in found if each.check == check)
    assert (match.verdict, bool(match.fix)) == (verdict, True)


def test_a_connector_is_looked_for_where_requests_are_split() -> None:
    assert "KV connector" not in judged(well())
    assert judged(well(), split=True)["KV connector"] is Verdict.UNKNOWN
    with_one = well(metrics=said(text=METRICS + b"vllm:nixl_xfer_time_seconds_count 0\n"))
    assert judged(with_one, split=True)["KV connector"] is Verdict.PASS


def test_engines_are_told_apart_by_their_metrics() -> None:
    assert kind_of(METRICS) is EngineKind.VLLM
    assert kind_of(b"sglang:token_usage 0.1\n") is EngineKind.SGLANG
    assert kind_of(b"trtllm_num_requests_running 1\n") is EngineKind.TRTLLM
    assert kind_of(b"go_goroutines 1\n") is None


def listed(fleet: Fleet) -> dict[str, Verdict]:
    return {each.check: each.verdict for each in points(fleet)}


def config(**more: Any) -> Config:
    spec = {"name": "g", "url": "http://gpu1:8000", "layout": {"tp": 4}}
    usual = {"version": 1, "pools": {"chat": {"endpoints": [spec]}}, "models": [{"name": "m", "pool": "chat"}]}
    return Config.model_validate(usual | more)


def test_the_checklist_has_twelve_points_and_says_of_each_what_can_be_said() -> None:
    found = listed(Fleet([Member(endpoint(layout=Layout(tp=4)), well())], config(), {"g": (0.01, 0.02)}))
    assert len(found) == 12
    unseen = {check for check, verdict in found.items() if verdict is Verdict.UNKNOWN}
    assert len(unseen) == 4  # links, collectives, quality, cost: nobody outside the engines can tell
    assert found["TP degree fits weights and KV"] is Verdict.PASS
    assert found["decode speed at batch 1 and 16"] is Verdict.PASS
    assert found["TP size written down"] is Verdict.PASS
    assert found["a smaller model when the large one is full"] is Verdict.WARN


def test_the_checklist_fails_what_would_break() -> None:
    small = well(models=said({"data": [{"id": "m", "max_model_len": 15_000}]}))
    wide = endpoint(layout=Layout(tp=16), context_tokens=32_768)
    found = listed(Fleet([Member(wide, small)], config(health={"progress": "60s"}), {"g": (0.01, 0.09)}))
    assert found["TP degree fits weights and KV"] is Verdict.FAIL
    assert found["TP within one fast domain"] is Verdict.FAIL
    assert found["sizes as configured"] is Verdict.FAIL
    assert found["decode speed at batch 1 and 16"] is Verdict.WARN
    assert found["a lost GPU fails fast"] is Verdict.WARN
    blind = listed(Fleet([Member(endpoint(), well(metrics=said(status=404)))]))
    assert blind["KV memory watched"] is Verdict.FAIL


async def test_real_probes_of_engines_without_a_file_tell_who_is_not_there() -> None:
    async with house(1) as home:
        words = ("doctor", "--engine", home.groups[0].url, "--engine", "http://127.0.0.1:9", "--measure", "--json")
        done = await asyncio.to_thread(CliRunner().invoke, cli.app, words)
        told = json.loads(done.output)
        verdicts = {(each["subject"], each["check"]): each["verdict"] for each in told["findings"]}
        name = home.groups[0].url.removeprefix("http://")
        assert (done.exit_code, told["ok"]) == (1, False)
        assert verdicts["127.0.0.1:9", "reachable"] == "fail"
        ours = {check: verdict for (subject, check), verdict in verdicts.items() if subject == name}
        assert ours["token ids"] == ours["usage details"] == ours["keep-alive"] == ours["metrics"] == "pass"
        assert "decode speed at batch 1 and 16" in ours


def test_who_is_discovered_is_said_not_to_be_examined(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("version: 1\npools: {chat: {discover: {file: engines.yaml}}}\n")
    done = CliRunner().invoke(cli.app, ["doctor", "--config", str(file), "--json"])
    told = [(each["subject"], each["check"], each["verdict"]) for each in json.loads(done.output)["findings"]]
    assert (done.exit_code, ("pool chat", "discovery", "unknown") in told) == (0, True), done.output


async def test_a_bad_file_is_told_with_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("version: 1\npools:\n  chat:\n    endpoints: [{url: 'gpu1:8000'}]\n")
    done = CliRunner().invoke(cli.app, ["doctor", "--config", str(file)])
    assert done.exit_code == 1
    assert "gateway.yaml:4:23" in "".join(done.output.split()), done.output
    assert CliRunner().invoke(cli.app, ["doctor"]).exit_code == 2
