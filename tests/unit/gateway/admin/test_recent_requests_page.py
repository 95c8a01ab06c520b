"""Tests that GET /requests lists the last finished requests, without any text that clients
wrote.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.admin.recent_requests_page import (
    MAX_LIMIT,
    RecentQuery,
    merge_recent,
    read_query,
    recent_rows,
)
from gateway.protocol import api_table
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from gateway.telemetry.recent_requests import RecentExchanges
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


def ended(number: int, outcome: str = "served", slo_outcome: str = "met") -> Exchange:
    x = Exchange(f"req_{number}", api_table.CHAT, "127.0.0.1", float(number))
    x.status, x.outcome, x.slo_outcome, x.model = 200, outcome, slo_outcome, "demo"
    return x


def ring(*exchanges: Exchange, size: int = 512) -> RecentExchanges:
    explained = RecentExchanges(size)
    for x in exchanges:
        explained.add(x, TokenUsage(), 0, x.accepted_at + 0.25)
    return explained


def ids(page: dict[str, Any]) -> list[str]:
    return [row["id"] for row in page["requests"]]


def test_rows_are_newest_first_and_limited() -> None:
    explained = ring(*(ended(number) for number in range(9)), size=5)
    assert ids(recent_rows(explained, RecentQuery(3))) == ["req_8", "req_7", "req_6"]
    assert ids(recent_rows(explained, RecentQuery())) == [
        "req_8",
        "req_7",
        "req_6",
        "req_5",
        "req_4",
    ]
    assert recent_rows(explained, RecentQuery())["size"] == 5
    assert recent_rows(ring(ended(1), size=0), RecentQuery()) == {"size": 0, "requests": []}


def test_problems_are_failures_rejections_and_missed_slos() -> None:
    explained = ring(
        *(
            ended(1),
            ended(2, "refused", "shed"),
            ended(3, "interrupted", "failed"),
            ended(4, slo_outcome="ttft_missed"),
        ),
        *(ended(5, slo_outcome=""), ended(6, "client_gone", ""), ended(7, "preempted", "")),
    )
    assert ids(recent_rows(explained, RecentQuery(problems=True))) == [
        "req_6",
        "req_4",
        "req_3",
        "req_2",
    ]
    assert [row["problem"] for row in recent_rows(explained, RecentQuery())["requests"]] == [
        False,
        True,
        False,
        True,
        True,
        True,
        False,
    ]


def test_output_tokens_of_a_stream_without_usage_are_estimated_from_events() -> None:
    explained = RecentExchanges(2)
    explained.add(ended(1), TokenUsage(), 12, 1.0)
    explained.add(ended(2), TokenUsage(30, 7, 20), 12, 1.0)
    exact, estimated = recent_rows(explained, RecentQuery())["requests"]
    assert (exact["prompt_tokens"], exact["cached_tokens"], exact["output_tokens"]) == (30, 20, 7)
    assert (estimated["prompt_tokens"], estimated["cached_tokens"], estimated["output_tokens"]) == (
        None,
        None,
        10,
    )


def test_rows_of_workers_are_merged_by_end_time() -> None:
    pages = [
        recent_rows(ring(ended(1), ended(4)), RecentQuery()),
        recent_rows(ring(ended(2), ended(3)), RecentQuery()),
    ]
    both = merge_recent(pages, RecentQuery(3))
    assert (both["size"], ids(both)) == (1024, ["req_4", "req_3", "req_2"])


@pytest.mark.parametrize(
    "limit", ["0", str(MAX_LIMIT + 1), "-1", "ten", "", "1e2", "²", "99999999999"]
)
def test_a_limit_out_of_range_is_an_error(limit: str) -> None:
    with pytest.raises(ValueError, match="from 1 to 200"):
        read_query({"limit": limit})


def test_the_path_of_a_query_parses_to_the_same_query() -> None:
    query = read_query({"limit": "7", "problems": "1"})
    assert (query, query.path) == (RecentQuery(7, True), "/requests?limit=7&problems=1")
    with pytest.raises(ValueError, match="0 or 1"):
        read_query({"problems": "yes"})


async def listed(fleet: GatewayFleet, query: str = "") -> tuple[int, Any]:
    async with fleet.http.get(f"{fleet.app.admin_url}/requests{query}") as answer:
        return answer.status, json.loads(await answer.text())


async def test_rows_contain_numbers_and_no_request_text() -> None:
    async with gateway_fleet(1) as fleet:
        served = await fleet.ask(prompt="what only the client knows", tokens=6)
        fleet.groups[0].faults.apply("5xx")
        await fleet.ask(prompt="what only the client knows")
        status, page = await listed(fleet)
        assert (status, len(page["requests"])) == (200, 2)
        assert "only the client" not in json.dumps(page)
        failed, row = page["requests"]
        assert row["id"] == next(
            value for name, value in served.headers.items() if name.lower() == "x-request-id"
        )
        assert row["endpoint"] == fleet.app.gateway.endpoints.all()[0].endpoint.name
        assert (row["model"], row["status"], row["outcome"], row["slo_outcome"]) == (
            "demo-8b",
            200,
            "served",
            "met",
        )
        assert row["output_tokens"] == 6
        assert 0 <= row["ttft_s"] <= row["took_s"]
        assert (failed["problem"], failed["outcome"]) == (True, "refused")
        assert failed["at"] >= row["at"]
        assert ids((await listed(fleet, "?problems=1"))[1]) == [failed["id"]]
        assert (await listed(fleet, "?limit=0"))[0] == 400
        async with fleet.http.get(f"{fleet.app.admin_url}/explain/{row['id']}") as answer:
            assert (await answer.json())["id"] == row["id"]
