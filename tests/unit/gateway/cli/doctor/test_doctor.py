"""Tests of `penstock doctor`: findings about engines and configurations, and the checklist."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from gateway.cli import main
from gateway.cli.doctor.engine_checks import check_engine, engine_kind_of
from gateway.cli.doctor.engine_probe import EngineConnection, ProbeResponse, ProbeResult
from gateway.cli.doctor.findings import CheckVerdict, fail_finding, group_findings, pass_finding
from gateway.cli.doctor.production_checklist import CheckedEndpoint, CheckedFleet, run_checklist
from gateway.config import Config
from policies.routing_types import Endpoint, EngineKind
from policies.sizing.parallel_layout import Layout
from tests.chaos.gateway_fleet import gateway_fleet
from tests.command_runner import CommandRunner
from tests.redis_server import redis_server

METRICS = b"""vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.1
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0
"""


def response(value: Any = None, status: int = 200, text: bytes = b"") -> ProbeResponse:
    return ProbeResponse(status, value, text, 0.01)


def schema(*chat: str, completion: tuple[str, ...] | None = None) -> ProbeResponse:
    known = {
        "ChatCompletionRequest": chat,
        "CompletionRequest": chat if completion is None else completion,
    }
    return response(
        {
            "paths": {"/v1/chat/completions": {}, "/v1/responses": {}, "/docs": {}},
            "components": {
                "schemas": {name: {"properties": dict.fromkeys(of)} for name, of in known.items()}
            },
        }
    )


def well(**more: Any) -> ProbeResult:
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    facts = {
        "health": response(),
        "version": response({"version": "0.11.0"}),
        "schema": schema("cache_salt"),
        "models": response({"data": [{"id": "m", "max_model_len": 8192}]}),
        "metrics": response(text=METRICS),
        "token": response({"usage": usage, "choices": [{"token_ids": [7]}]}),
        "connection_count": 1,
        "skew_s": 0.4,
    }
    return ProbeResult("http://gpu1:8000", **(facts | more))


def endpoint(**more: Any) -> Endpoint:
    usual = {
        "name": "g",
        "url": "http://gpu1:8000",
        "pool": "chat",
        "served_model": "",
        "salt_member": "cache_salt",
    }
    return Endpoint(**(usual | more))


def judged(
    responses: ProbeResult, of: Endpoint | None = None, split: bool = False
) -> dict[str, CheckVerdict]:
    return {
        finding.check: finding.verdict
        for finding in check_engine(responses, of or endpoint(), {"m": "m"}, split=split)
    }


def test_a_healthy_engine_passes_every_check() -> None:
    assert set(judged(well()).values()) == {CheckVerdict.PASS}


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (response(status=404), "the engine keeps responses"),
        (
            response(status=400, text=b"set VLLM_ENABLE_RESPONSES_API_STORE=1"),
            "the engine keeps no",
        ),
    ],
)
def test_the_apis_of_an_engine_and_whether_it_keeps_responses_are_shown(
    store: ProbeResponse, words: str
) -> None:
    findings = check_engine(well(store=store), endpoint(), {"m": "m"}, split=False)
    text = {finding.check: finding.seen for finding in findings}
    assert text["APIs"].startswith("it lists /v1/chat/completions, /v1/responses; requests to")
    assert text["stored responses"].startswith(words)


@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({"problem": "ConnectionRefusedError"}, "reachable", CheckVerdict.FAIL),
        ({"health": response(status=401)}, "reachable", CheckVerdict.FAIL),
        ({"health": response(status=503)}, "reachable", CheckVerdict.FAIL),
        ({"version": response(status=404)}, "version", CheckVerdict.UNKNOWN),
        ({"models": response({"data": [{"id": "other"}]})}, "models", CheckVerdict.FAIL),
        ({"models": response([1])}, "models", CheckVerdict.FAIL),
        ({"metrics": response(status=404)}, "metrics", CheckVerdict.WARN),
        (
            {"metrics": response(text=b"vllm:num_requests_running 1\n")},
            "metrics",
            CheckVerdict.WARN,
        ),
        ({"metrics": response(text=b"sglang:num_running_reqs 1\n")}, "metrics", CheckVerdict.FAIL),
        ({"token": response(status=500)}, "one token", CheckVerdict.FAIL),
        ({"token": response({"usage": {}, "choices": [{}]})}, "usage details", CheckVerdict.WARN),
        ({"token": response({"usage": None, "choices": None})}, "token ids", CheckVerdict.UNKNOWN),
        ({"schema": response(status=404)}, "cache salt", CheckVerdict.UNKNOWN),
        ({"schema": response(status=404)}, "APIs", CheckVerdict.UNKNOWN),
        ({"schema": response({"paths": [1]})}, "APIs", CheckVerdict.UNKNOWN),
        ({"store": response(status=500)}, "stored responses", CheckVerdict.UNKNOWN),
        ({"schema": response({"components": [1]})}, "cache salt", CheckVerdict.UNKNOWN),
        ({"schema": schema("model")}, "cache salt", CheckVerdict.FAIL),
        ({"schema": schema("cache_salt", completion=())}, "cache salt", CheckVerdict.FAIL),
        ({"connection_count": 4}, "keep-alive", CheckVerdict.WARN),
        ({"skew_s": -7.0}, "clock", CheckVerdict.WARN),
        ({"skew_s": 3600.0}, "clock", CheckVerdict.FAIL),
        ({"skew_s": None}, "clock", CheckVerdict.UNKNOWN),
    ],
)
def test_every_problem_has_a_fix(
    changes: dict[str, Any], check: str, verdict: CheckVerdict
) -> None:
    findings = check_engine(well(**changes), endpoint(), {"m": "m"}, split=False)
    match = next(finding for finding in findings if finding.check == check)
    assert (match.verdict, bool(match.fix)) == (verdict, True)


def test_the_kv_connector_is_checked_where_requests_are_split() -> None:
    assert "KV connector" not in judged(well())
    assert judged(well(), split=True)["KV connector"] is CheckVerdict.UNKNOWN
    with_one = well(metrics=response(text=METRICS + b"vllm:nixl_xfer_time_seconds_count 0\n"))
    assert judged(with_one, split=True)["KV connector"] is CheckVerdict.PASS


def test_engines_are_identified_by_their_metrics() -> None:
    assert engine_kind_of(METRICS) is EngineKind.VLLM
    assert engine_kind_of(b"sglang:token_usage 0.1\n") is EngineKind.SGLANG
    assert engine_kind_of(b"trtllm_num_requests_running 1\n") is EngineKind.TRTLLM
    assert engine_kind_of(b"go_goroutines 1\n") is None


def listed(fleet: CheckedFleet) -> dict[str, CheckVerdict]:
    return {finding.check: finding.verdict for finding in run_checklist(fleet)}


def config(**more: Any) -> Config:
    spec = {"name": "g", "url": "http://gpu1:8000", "layout": {"tp": 4}}
    usual = {
        "version": 1,
        "pools": {"chat": {"endpoints": [spec]}},
        "models": [{"name": "m", "pool": "chat"}],
    }
    return Config.model_validate(usual | more)


def test_the_checklist_has_twelve_checks() -> None:
    verdicts = listed(
        CheckedFleet(
            [CheckedEndpoint(endpoint(layout=Layout(tp=4)), well())], config(), {"g": (0.01, 0.02)}
        )
    )
    assert len(verdicts) == 12
    unseen = {check for check, verdict in verdicts.items() if verdict is CheckVerdict.UNKNOWN}
    assert (
        len(unseen) == 4
    )  # links, collectives, quality, cost: not visible from outside the engines
    assert verdicts["TP degree fits weights and KV"] is CheckVerdict.PASS
    assert verdicts["decode speed at batch 1 and 16"] is CheckVerdict.PASS
    assert verdicts["TP size configured"] is CheckVerdict.PASS
    assert verdicts["fallback to a smaller model"] is CheckVerdict.WARN


def test_an_engine_without_cache_salt_warns_unless_reserved_for_a_tenant() -> None:
    assert judged(well(), endpoint(salt_member=""))["cache salt"] is CheckVerdict.WARN
    assert (
        judged(well(), endpoint(salt_member="", tenants=frozenset({"a"})))["cache salt"]
        is CheckVerdict.PASS
    )


def test_the_checklist_fails_unsafe_settings() -> None:
    small = well(models=response({"data": [{"id": "m", "max_model_len": 15_000}]}))
    wide = endpoint(layout=Layout(tp=16), context_tokens=32_768)
    verdicts = listed(
        CheckedFleet(
            [CheckedEndpoint(wide, small)], config(health={"progress": "60s"}), {"g": (0.01, 0.09)}
        )
    )
    assert verdicts["TP degree fits weights and KV"] is CheckVerdict.FAIL
    assert verdicts["TP within one fast domain"] is CheckVerdict.FAIL
    assert verdicts["context length as configured"] is CheckVerdict.FAIL
    assert verdicts["decode speed at batch 1 and 16"] is CheckVerdict.WARN
    assert verdicts["a lost GPU fails fast"] is CheckVerdict.WARN
    blind = listed(CheckedFleet([CheckedEndpoint(endpoint(), well(metrics=response(status=404)))]))
    assert blind["KV memory monitored"] is CheckVerdict.FAIL


def test_the_link_domain_size_comes_from_the_configuration() -> None:
    member = CheckedEndpoint(endpoint(layout=Layout(tp=72)), well())
    nvl72 = listed(CheckedFleet([member], config(hardware={"link_domain_gpus": 72})))
    assert nvl72["TP within one fast domain"] is CheckVerdict.UNKNOWN
    assert (
        listed(CheckedFleet([member], config()))["TP within one fast domain"] is CheckVerdict.FAIL
    )


async def test_probes_report_an_unreachable_engine() -> None:
    async with gateway_fleet(1) as fleet:
        words = (
            "doctor",
            "--engine",
            fleet.groups[0].url,
            "--engine",
            "http://127.0.0.1:9",
            "--measure",
            "--json",
        )
        done = await asyncio.to_thread(CommandRunner().invoke, main.run, words)
        reply = json.loads(done.output)
        verdicts = {
            (finding["subject"], finding["check"]): finding["verdict"]
            for finding in reply["findings"]
        }
        name = fleet.groups[0].url.removeprefix("http://")
        assert (done.exit_code, reply["ok"]) == (1, False)
        assert verdicts["127.0.0.1:9", "reachable"] == "fail"
        ours = {check: verdict for (subject, check), verdict in verdicts.items() if subject == name}
        assert ours["cache salt"] == ours["APIs"] == ours["stored responses"] == "pass"
        assert (
            ours["token ids"]
            == ours["usage details"]
            == ours["keep-alive"]
            == ours["metrics"]
            == "pass"
        )
        assert "decode speed at batch 1 and 16" in ours


@pytest.mark.parametrize(
    ("blocks", "verdict"), [(24_837, CheckVerdict.PASS), (20_000, CheckVerdict.WARN)]
)
def test_the_kv_size_of_a_known_model_is_compared_with_the_computed_one(
    blocks: int, verdict: CheckVerdict
) -> None:
    # 70B at TP 4 on H100: 397,404 tokens.
    metrics = METRICS.replace(b'num_gpu_blocks="1000"', b'num_gpu_blocks="%d"' % blocks)
    cards = {"data": [{"id": "llama-3.1-70b", "max_model_len": 8192}]}
    result = well(metrics=response(text=metrics), models=response(cards))
    member = CheckedEndpoint(endpoint(layout=Layout(4), labels={"gpu": "h100"}), result)
    (finding,) = (
        finding
        for finding in run_checklist(CheckedFleet([member]))
        if finding.check == "KV size as computed"
    )
    assert finding.verdict is verdict
    assert "computed are 397,404" in finding.seen


def test_discovered_endpoints_are_reported_as_not_checked(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("version: 1\npools: {chat: {discover: {file: engines.yaml}}}\n")
    done = CommandRunner().invoke(main.run, ["doctor", "--config", str(file), "--json"])
    reply = [
        (finding["subject"], finding["check"], finding["verdict"])
        for finding in json.loads(done.output)["findings"]
    ]
    assert (done.exit_code, ("pool chat", "discovery", "unknown") in reply) == (0, True), (
        done.output
    )


async def test_an_invalid_file_is_reported_with_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("version: 1\npools:\n  chat:\n    endpoints: [{url: 'gpu1:8000'}]\n")
    done = CommandRunner().invoke(main.run, ["doctor", "--config", str(file)])
    assert done.exit_code == 1
    assert "gateway.yaml:4:23" in "".join(done.output.split()), done.output
    assert CommandRunner().invoke(main.run, ["doctor"]).exit_code == 2


def test_findings_of_48_engines_are_grouped_with_the_worst_first() -> None:
    findings = [pass_finding(f"gpu-{n}", "health", f"answered in {n} ms") for n in range(48)]
    findings += [fail_finding(f"gpu-{n}", "metrics", "404", "start with metrics") for n in (3, 9)]
    grouped = group_findings(findings)
    assert [(finding.verdict, finding.subject) for finding in grouped] == [
        (CheckVerdict.FAIL, "gpu-3, gpu-9"),
        (CheckVerdict.PASS, "gpu-0, gpu-1, gpu-2 and 45 more"),
    ]
    assert [finding.seen for finding in grouped] == ["404", "for example: answered in 0 ms"]


def test_findings_of_few_engines_are_not_grouped() -> None:
    findings = [pass_finding(f"gpu-{n}", "health", "well") for n in range(8)]
    assert group_findings(findings) == findings


def test_counts_are_printed_before_the_findings() -> None:
    done = CommandRunner().invoke(
        main.run, ["doctor", *(f"--engine=http://127.0.0.1:{n}" for n in range(1, 49))]
    )
    first, *rest = done.output.splitlines()
    assert "48 failed" in first
    assert len(rest) < 12


def test_an_idle_connection_closed_by_the_engine_is_reopened() -> None:
    requests: list[str] = []

    def serve(listener: socket.socket) -> None:
        for _ in range(2):  # one response per connection, which announces keep-alive and closes
            connection, _ = listener.accept()
            with connection:
                requests.append(connection.recv(65536).decode().partition("\r\n")[0])
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        line = EngineConnection(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        assert [line.request("GET", path).status for path in ("/health", "/version")] == [200, 200]
        line.close()
        thread.join(20)
    assert requests == ["GET /health HTTP/1.1", "GET /version HTTP/1.1"]
    assert line.opened == 2


@pytest.mark.parametrize(
    ("password", "verdict"), [("right-one", "pass"), ("hunter2", "fail"), (None, "fail")]
)
def test_doctor_checks_redis_and_reports_a_wrong_password(
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
        env = {"KEY": "a key of the fleet's own"} | (
            {} if password is None else {"PASSWORD": password}
        )
        done = CommandRunner().invoke(
            main.run, ["doctor", "--config", str(tmp_path / "g.yaml"), "--json"], env=env
        )
    (redis_finding,) = [
        finding for finding in json.loads(done.output)["findings"] if finding["check"] == "Redis"
    ]
    assert redis_finding["verdict"] == verdict
    assert verdict == "pass" or "password" in redis_finding["seen"]
    assert "hunter2" not in done.output


async def test_only_the_checklist_of_the_seeds_is_shown_by_its_items() -> None:
    async with gateway_fleet(1) as fleet:
        words = ("doctor", "--engine", fleet.groups[0].url, "--seeds", "--json")
        done = await asyncio.to_thread(CommandRunner().invoke, main.run, words)
    findings = json.loads(done.output)["findings"]
    assert {int(finding["check"].split()[0]) for finding in findings} == set(range(86, 98))
    assert all(finding["seen"] for finding in findings)
    assert all(finding["fix"] for finding in findings if finding["verdict"] != "pass")


def test_the_share_of_collectives_is_judged_where_it_is_known() -> None:
    member = CheckedEndpoint(endpoint(layout=Layout(tp=4)), well())
    check = "collective time per layer"
    shares = {0.1: CheckVerdict.PASS, 0.5: CheckVerdict.WARN}
    for share, verdict in shares.items():
        assert listed(CheckedFleet([member], config(), {}, {"g": share}))[check] is verdict


@pytest.mark.parametrize(
    ("model", "verdict"),
    [
        ("llama-3.1-70b", CheckVerdict.PASS),
        ("llama-3.1-70b-fp8", CheckVerdict.UNKNOWN),
        ("own", CheckVerdict.UNKNOWN),
    ],
)
def test_only_weights_that_are_not_quantised_need_no_golden_prompts(
    model: str, verdict: CheckVerdict
) -> None:
    member = CheckedEndpoint(endpoint(served_model=model), well())
    assert listed(CheckedFleet([member]))["quality of quantised weights"] is verdict
