"""Tests that a traced request is one tree of spans, and that engines receive its context."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from gateway.http.engine_connections import UpstreamConnection
from gateway.protocol import api_table
from gateway.protocol.response.relay import Relay
from gateway.protocol.trace_context import LegSpan, Trace
from gateway.request_record import Exchange
from gateway.telemetry import span_attribute_names as semconv
from gateway.telemetry import span_exporter
from gateway.telemetry.spans import build_spans
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.duration_limits import PATIENCE_S
from tests.e2e.split_fleet import SENTENCE, split_fleet
from tests.replacement import replace_method
from tests.unit.gateway.telemetry.otlp_collector import Collector, collector
from tests.virtual_time import VIRTUAL_TIME

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{ID}-{SPAN}-01", f"00-{ID}-{SPAN}-00"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_exporter, "FLUSH_S", 0.01)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    heads: list[str] = []
    carry = UpstreamConnection.start

    def noted(self: UpstreamConnection, head: bytes, *rest: Any) -> Any:
        heads.append(head.decode())
        return carry(self, head, *rest)

    replace_method(monkeypatch, UpstreamConnection, "start", noted)
    return heads


def contexts(heads: list[str]) -> list[str]:
    return [
        context for head in heads for context in re.findall(r"\r\ntraceparent: (\S+)\r\n", head)
    ]


def seen(there: Collector, log: str = "off", **more: object) -> dict[str, object]:
    return {"access_log": log, "traces": {"endpoint": there.url, "ratio": 1.0} | more}


def test_spans_have_predicted_and_actual_times_and_unix_time_stamps() -> None:
    relay = Relay(b"")
    relay.first_byte_at, relay.first_token_at, relay.last_data_at, relay.is_committed = (
        1.9,
        2.0,
        3.0,
        True,
    )
    x = Exchange("req_1", api_table.CHAT, "client", 0.5)
    x.model, x.status, x.relay = "m", 200, relay
    x.received_at, x.parsed_at, x.admitted_at, x.picked_at, x.sent_at = 1.0, 1.1, 1.2, 1.3, 1.4
    x.ttft_s, x.tpot_s, x.predicted_ttft_s, x.predicted_tpot_s = 1.0, 0.1, 0.8, 0.09
    trace = Trace(ID, SPAN, "", "", [LegSpan("whole", "a", "e" * 16, 1.4)])
    spans = {
        span.name.split()[0]: span for span in build_spans(x, trace, 3.5, unix_offset=1_000_000.0)
    }
    shown = {span.key: span.value.get("doubleValue") for span in spans["chat"].attributes}
    names = (semconv.PREDICTED_TTFT, semconv.TTFT, semconv.PREDICTED_TPOT, semconv.TPOT)
    assert [shown[name] for name in names] == [0.8, 1.0, 0.09, 0.1]
    times = {
        name: (span.start_time_unix_nano, span.end_time_unix_nano) for name, span in spans.items()
    }
    assert times["chat"] == ("1000000500000000", "1000003500000000")
    assert times["first_token"] == ("1000001400000000", "1000002000000000")
    assert times["decode"] == ("1000002000000000", "1000003000000000")


@VIRTUAL_TIME
async def test_a_request_is_one_tree_from_its_first_byte_to_its_last(sent: list[str]) -> None:
    async with collector() as there, gateway_fleet(2, 100, observability=seen(there)) as fleet:
        for _ in range(3):
            assert (await fleet.ask(tokens=6)).fate == "ok"
        await there.heard(21)
        assert there.tree() == {
            "chat demo-8b": {
                "admit": {},
                "queue": {},
                "pick": {},
                "engine": {"first_token": {}, "decode": {}},
            }
        }
        root, engine, pick = there.named("chat"), there.named("engine"), there.named("pick")
        attributes = root["attributes"]
        assert (root["kind"], engine["kind"], root.get("parentSpanId")) == (2, 3, None)
        assert attributes[semconv.OPERATION] == "chat"
        assert (attributes[semconv.REQUEST_MODEL], attributes[semconv.FINISH]) == (
            "demo-8b",
            ["length"],
        )
        assert attributes[semconv.SLO_OUTCOME] == "met"
        assert attributes[semconv.TTFT] > 0
        assert pick["attributes"][semconv.ENDPOINT] == engine["attributes"][semconv.ENDPOINT]
        ids = [
            (span["traceId"], span["spanId"]) for span in there.spans if span["name"] == "engine"
        ]
        assert contexts(sent) == [f"00-{trace}-{span}-01" for trace, span in ids]
        assert there.resources[0]["service.name"] == "penstock"
        assert UUID(there.resources[0]["service.instance.id"]).version == 4
    assert fleet.metric("penstock_trace_spans_total") == len(there.spans)


async def test_an_unstreamed_response_has_its_token_counts() -> None:
    async with collector() as there, gateway_fleet(1, observability=seen(there)) as fleet:
        assert (await fleet.ask(stream=False, tokens=6)).fate == "ok"
        await there.heard(7)
        attributes = there.named("chat")["attributes"]
        assert attributes[semconv.OUTPUT_TOKENS] == 6
        assert attributes[semconv.INPUT_TOKENS] > 0


async def test_a_split_request_shows_both_legs_and_each_engine_gets_its_own(
    sent: list[str],
) -> None:
    async with (
        collector() as there,
        split_fleet("vllm_nixl", groups=(1, 1), observability=seen(there)) as fleet,
    ):
        await fleet.assert_right_answer({"prompt": SENTENCE * 30, "max_tokens": 8, "stream": True})
        await there.heard(9)
        below = {"transfer": {}, "first_token": {}, "decode": {}}
        ((name, parts),) = there.tree().items()
        assert name == "text_completion m"
        assert parts == {"admit": {}, "queue": {}, "pick": {}, "prefill": {}, "engine": below}
        legs = [there.named("prefill"), there.named("engine")]
        assert contexts(sent) == [f"00-{span['traceId']}-{span['spanId']}-01" for span in legs]
        assert [leg["attributes"][semconv.ROLE] for leg in legs] == ["prefill", "decode"]
        assert there.named("transfer")["attributes"][semconv.TRANSPORT] == "inproc"


async def test_a_retry_is_a_second_leg_and_the_first_one_is_marked_as_failed() -> None:
    async with collector() as there, gateway_fleet(2, observability=seen(there)) as fleet:
        fleet.groups[0].faults.apply("5xx")
        for _ in range(2):
            assert (await fleet.ask()).fate == "ok"
        await there.heard(15)
        failed = [span for span in there.spans if span["name"] == "engine" and "status" in span]
        assert {span["status"]["code"] for span in failed} == {2}
        assert there.named("chat").get("status", {}) == {}


async def test_the_clients_sampling_decision_counts_and_its_span_is_the_parent(
    sent: list[str],
) -> None:
    async with (
        collector() as there,
        gateway_fleet(1, observability=seen(there, ratio=0.0)) as fleet,
    ):
        await ask_with(fleet, {})
        await ask_with(fleet, {"traceparent": UNSAMPLED})
        await ask_with(fleet, {"traceparent": SAMPLED, "tracestate": "vendor=1"})
        await there.heard(7)
        root = there.named("chat")
        assert {span["traceId"] for span in there.spans} == {ID}
        assert (root["parentSpanId"], root["traceState"]) == (SPAN, "vendor=1")
        assert contexts(sent) == [UNSAMPLED, f"00-{ID}-{there.named('engine')['spanId']}-01"]
        assert "\r\ntracestate: vendor=1\r\n" in sent[-1]


async def test_without_a_collector_the_trace_context_is_passed_to_the_engine(
    sent: list[str],
) -> None:
    async with gateway_fleet(1) as fleet:
        assert fleet.app.gateway.accounts.tracer is None
        await ask_with(fleet, {"traceparent": SAMPLED})
        await ask_with(fleet, {"traceparent": "nonsense"})
        assert contexts(sent) == [SAMPLED]


async def test_a_refusal_is_traced_with_its_reason() -> None:
    async with collector() as there, gateway_fleet(1, observability=seen(there)) as fleet:
        body = {"model": "nobody-has-it", "messages": []}
        async with fleet.http.post(f"{fleet.app.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 404
        await there.heard(1)
        attributes = there.named("chat")["attributes"]
        assert (
            attributes[semconv.STATUS],
            attributes[semconv.OUTCOME],
            attributes[semconv.ERROR],
        ) == (404, "refused", "model_not_found")


async def test_an_unreachable_collector_delays_no_request_and_gets_later_spans() -> None:
    async with collector() as there, gateway_fleet(1, observability=seen(there)) as fleet:
        there.answer = 503
        assert (await fleet.ask()).fate == "ok"
        async with asyncio.timeout(PATIENCE_S):
            while not fleet.metric("penstock_trace_spans_total"):
                await asyncio.sleep(0.005)
        assert [(await fleet.ask()).fate for _ in range(5)] == ["ok"] * 5
        there.answer = 200
        fleet.app._tracer._pause_s = 0.0
        fleet.app._tracer._begin()
        await there.heard(35)
    results = fleet.app.metrics.runtime_gauges.trace_spans_total
    assert {values[0]: meter.value for values, meter in results.children()} == {
        "exported": 35,
        "dropped": 0,
        "failed": 7,
    }


async def test_a_full_queue_drops_and_counts_new_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_exporter, "MOST_WAITING", 10)
    monkeypatch.setattr(span_exporter, "FLUSH_S", 60.0)
    async with collector() as there, gateway_fleet(1, observability=seen(there)) as fleet:
        for _ in range(5):
            assert (await fleet.ask()).fate == "ok"
            fleet.app.gateway.accounts.account_ended()
        assert len(fleet.app._tracer._queue) == 14
        assert fleet.metric("penstock_trace_spans_total") == 15
    assert len(there.spans) == 14, "the last ones had their chance when the gateway ended"


async def test_the_collectors_key_is_sent_and_never_shown() -> None:
    async with (
        collector() as there,
        gateway_fleet(1, observability=seen(there, key="canary-5f2e9c")) as fleet,
    ):
        assert (await fleet.ask()).fate == "ok"
        await there.heard(7)
        assert there.authorizations[0] == "Bearer canary-5f2e9c"
        async with fleet.http.get(fleet.app.admin_url + "/config") as answer:
            assert "canary-5f2e9c" not in await answer.text()
    assert "canary-5f2e9c" not in "".join(there.bodies)


async def ask_with(fleet: GatewayFleet, headers: dict[str, str]) -> None:
    body = {
        "model": "demo-8b",
        "max_tokens": 4,
        "stream": True,
        "messages": [{"role": "user", "content": "x"}],
    }
    async with fleet.http.post(
        f"{fleet.app.url}/v1/chat/completions", json=body, headers=headers
    ) as answer:
        await answer.read()
        assert answer.status == 200


async def test_openmetrics_exemplars_name_the_trace() -> None:
    async with collector() as there, gateway_fleet(1, observability=seen(there)) as fleet:
        assert (await fleet.ask()).fate == "ok"
        await there.heard(7)
        accept = {
            "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        }
        async with fleet.http.get(fleet.app.admin_url + "/metrics", headers=accept) as answer:
            assert answer.content_type == "application/openmetrics-text"
            families = {family.name: family for family in openmetrics(await answer.text())}
        marks = [
            span.exemplar for span in families["penstock_ttft_seconds"].samples if span.exemplar
        ]
        report = there.named("chat")
        expected = {
            "request_id": report["attributes"][semconv.REQUEST_ID],
            "trace_id": report["traceId"],
        }
        assert [mark.labels for mark in marks] == [expected]
        async with fleet.http.get(fleet.app.admin_url + "/metrics") as answer:
            assert answer.content_type == "text/plain"
            assert "# {" not in await answer.text()


async def test_the_access_line_and_the_explanation_name_the_trace(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with collector() as there, gateway_fleet(1, observability=seen(there, str(log))) as fleet:
        answered = await fleet.ask()
        (request_id,) = [
            value for name, value in answered.headers.items() if name.lower() == "x-request-id"
        ]
        async with fleet.http.get(f"{fleet.app.admin_url}/explain/{request_id}") as answer:
            explained = (await answer.json())["trace_id"]
        await there.heard(7)
    assert explained == there.named("chat")["traceId"] == json.loads(log.read_text())["trace_id"]


async def test_a_full_batch_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_exporter, "BATCH", 8)
    async with collector() as there, gateway_fleet(1, observability=seen(there)) as fleet:
        await asyncio.gather(*(fleet.ask() for _ in range(8)))
        fleet.app.gateway.accounts.account_ended()
        monkeypatch.setattr(span_exporter, "FLUSH_S", 60.0)
        await there.heard(48)


async def test_a_reload_turns_traces_on_and_off() -> None:
    async with collector() as there, gateway_fleet(1) as fleet:
        await apply_config(
            fleet, f"{{access_log: 'off', traces: {{endpoint: '{there.url}', ratio: 1}}}}"
        )
        assert (await fleet.ask()).fate == "ok"
        await there.heard(7)
        await apply_config(fleet, "{access_log: 'off'}")
        assert fleet.app.gateway.accounts.tracer is None
        assert (await fleet.ask()).fate == "ok"
    assert len(there.spans) == 7


async def apply_config(fleet: GatewayFleet, observability: str) -> None:
    pools = f"{{main: {{endpoints: [{{url: '{fleet.groups[0].url}', max_concurrency: 24}}]}}}}"
    listeners = "{api: {port: 0}, admin: {port: 0}}"
    text = f"version: 1\nlisteners: {listeners}\npools: {pools}\nobservability: {observability}\n"
    async with fleet.http.put(fleet.app.admin_url + "/config", data=text) as answer:
        reply = await answer.json()
        assert (answer.status, reply["needs_restart"]) == (200, []), reply
