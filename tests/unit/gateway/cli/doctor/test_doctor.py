"""`penstock doctor`: what it makes of an engine's words, of a configuration, and of the checklist before production."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from gateway.cli import main
from gateway.cli.doctor.checklist import Fleet, Member, points
from gateway.cli.doctor.engine import judge, kind_of
from gateway.cli.doctor.findings import Verdict, bad, good, group_findings
from gateway.cli.doctor.probe import Line, Probed, Said
from gateway.config import Config
from policies.model import Endpoint, EngineKind, Layout
from tests.chaos.gateway_fleet import gateway_fleet
from tests.redis_server import redis_server

METRICS = b"""vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.1
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0
"""


def said(value: Any = None, status: int = 200, text: bytes = b"") -> Said:
    return Said(status, value, text, 0.01)


def schema(*chat: str, completion: tuple[str, ...] | None = None) -> Said:
    known = {"ChatCompletionRequest": chat, "CompletionRequest": chat if completion is None else completion}
    return said({"components": {"schemas": {name: {"properties": dict.fromkeys(of)} for name, of in known.items()}}})


def well(**more: Any) -> Probed:
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    facts = {
        "health": said(),
        "version": said({"version": "0.11.0"}),
        "schema": schema("cache_salt"),
        "models": said({"data": [{"id": "m", "max_model_len": 8192}]}),
        "metrics": said(text=METRICS),
        "token": said({"usage": usage, "choices": [{"token_ids": [7]}]}),
        "connections": 1,
        "skew_s": 0.4,
    }
    return Probed("http://gpu1:8000", **(facts | more))


def endpoint(**more: Any) -> Endpoint:
    usual = {"name": "g", "url": "http://gpu1:8000", "pool": "chat", "served_model": "", "salt_member": "cache_salt"}
    return Endpoint(**(usual | more))


def judged(found: Probed, of: Endpoint | None = None, split: bool = False) -> dict[str, Verdict]:
    return {each.check: each.verdict for each in judge(found, of or endpoint(), {"m": "m"}, split=split)}


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
        ({"schema": said(status=404)}, "cache salt", Verdict.UNKNOWN),
        ({"schema": said({"components": [1]})}, "cache salt", Verdict.UNKNOWN),
        ({"schema": schema("model")}, "cache salt", Verdict.FAIL),
        ({"schema": schema("cache_salt", completion=())}, "cache salt", Verdict.FAIL),
        ({"connections": 4}, "keep-alive", Verdict.WARN),
        ({"skew_s": -7.0}, "clock", Verdict.WARN),
        ({"skew_s": 3600.0}, "clock", Verdict.FAIL),
        ({"skew_s": None}, "clock", Verdict.UNKNOWN),
    ],
)
def test_each_thing_that_is_wrong_is_told_with_what_to_do(told: dict[str, Any], check: str, verdict: Verdict) -> None:
    found = judge(well(**told), endpoint(), {"m": "m"}, split=False)
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


def test_an_engine_that_gets_no_salt_is_named_unless_it_is_reserved() -> None:
    assert judged(well(), endpoint(salt_member=""))["cache salt"] is Verdict.WARN
    assert judged(well(), endpoint(salt_member="", tenants=frozenset({"a"})))["cache salt"] is Verdict.PASS


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


def test_the_configuration_says_how_many_gpus_a_link_domain_has() -> None:
    member = Member(endpoint(layout=Layout(tp=72)), well())
    nvl72 = listed(Fleet([member], config(hardware={"link_domain_gpus": 72})))
    assert nvl72["TP within one fast domain"] is Verdict.UNKNOWN
    assert listed(Fleet([member], config()))["TP within one fast domain"] is Verdict.FAIL


async def test_real_probes_of_engines_without_a_file_tell_who_is_not_there() -> None:
    async with gateway_fleet(1) as home:
        words = ("doctor", "--engine", home.groups[0].url, "--engine", "http://127.0.0.1:9", "--measure", "--json")
        done = await asyncio.to_thread(CliRunner().invoke, main.app, words)
        told = json.loads(done.output)
        verdicts = {(each["subject"], each["check"]): each["verdict"] for each in told["findings"]}
        name = home.groups[0].url.removeprefix("http://")
        assert (done.exit_code, told["ok"]) == (1, False)
        assert verdicts["127.0.0.1:9", "reachable"] == "fail"
        ours = {check: verdict for (subject, check), verdict in verdicts.items() if subject == name}
        assert ours["cache salt"] == "pass"
        assert ours["token ids"] == ours["usage details"] == ours["keep-alive"] == ours["metrics"] == "pass"
        assert "decode speed at batch 1 and 16" in ours


def test_who_is_discovered_is_said_not_to_be_examined(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("version: 1\npools: {chat: {discover: {file: engines.yaml}}}\n")
    done = CliRunner().invoke(main.app, ["doctor", "--config", str(file), "--json"])
    told = [(each["subject"], each["check"], each["verdict"]) for each in json.loads(done.output)["findings"]]
    assert (done.exit_code, ("pool chat", "discovery", "unknown") in told) == (0, True), done.output


async def test_a_bad_file_is_told_with_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("version: 1\npools:\n  chat:\n    endpoints: [{url: 'gpu1:8000'}]\n")
    done = CliRunner().invoke(main.app, ["doctor", "--config", str(file)])
    assert done.exit_code == 1
    assert "gateway.yaml:4:23" in "".join(done.output.split()), done.output
    assert CliRunner().invoke(main.app, ["doctor"]).exit_code == 2


def test_findings_of_48_engines_are_grouped_with_the_worst_first() -> None:
    findings = [good(f"gpu-{n}", "health", f"answered in {n} ms") for n in range(48)]
    findings += [bad(f"gpu-{n}", "metrics", "404", "start with metrics") for n in (3, 9)]
    grouped = group_findings(findings)
    assert [(each.verdict, each.subject) for each in grouped] == [
        (Verdict.FAIL, "gpu-3, gpu-9"),
        (Verdict.PASS, "gpu-0, gpu-1, gpu-2 and 45 more"),
    ]
    assert [each.seen for each in grouped] == ["404", "for instance answered in 0 ms"]


def test_findings_of_few_engines_stay_as_they_are() -> None:
    findings = [good(f"gpu-{n}", "health", "well") for n in range(8)]
    assert group_findings(findings) == findings


def test_the_counts_stand_before_the_findings() -> None:
    done = CliRunner().invoke(main.app, ["doctor", *(f"--engine=http://127.0.0.1:{n}" for n in range(1, 49))])
    first, *rest = done.output.splitlines()
    assert "48 failed" in first
    assert len(rest) < 12


def test_a_kept_connection_that_the_engine_has_closed_is_opened_again() -> None:
    requests: list[str] = []

    def serve(listener: socket.socket) -> None:
        for _ in range(2):  # one answer per connection, which promises keep-alive and closes
            connection, _ = listener.accept()
            with connection:
                requests.append(connection.recv(65536).decode().partition("\r\n")[0])
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        line = Line(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        assert [line.ask("GET", path).status for path in ("/health", "/version")] == [200, 200]
        line.close()
        thread.join(20)
    assert requests == ["GET /health HTTP/1.1", "GET /version HTTP/1.1"]
    assert line.opened == 2


@pytest.mark.parametrize(("password", "verdict"), [("right-one", "pass"), ("hunter2", "fail"), (None, "fail")])
def test_doctor_says_whether_redis_can_be_used_and_names_a_wrong_password(
    tmp_path: Path, password: str | None, verdict: str
) -> None:
    with redis_server() as server:
        with Redis.from_url(server.url) as operator:
            operator.config_set("requirepass", "right-one")
        given = "" if password is None else ", password: '${PASSWORD}'"
        (tmp_path / "g.yaml").write_text(
            f"version: 1\npools: {{p: {{endpoints: [{{url: 'http://127.0.0.1:9'}}]}}}}\n"
            f"shared: {{redis: {{url: '{server.url}'{given}}}, key: '${{KEY}}'}}\n"
        )
        env = {"KEY": "a key of the fleet's own"} | ({} if password is None else {"PASSWORD": password})
        done = CliRunner().invoke(main.app, ["doctor", "--config", str(tmp_path / "g.yaml"), "--json"], env=env)
    (found,) = [each for each in json.loads(done.output)["findings"] if each["check"] == "Redis"]
    assert found["verdict"] == verdict
    assert verdict == "pass" or "password" in found["seen"]
    assert "hunter2" not in done.output
