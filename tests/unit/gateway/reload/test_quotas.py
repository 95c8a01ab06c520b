"""Tests of quotas for the whole gateway: refusals, refunds, and reloads that keep their state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from gateway.admission.quota_charges import Quotas
from gateway.protocol.request.media import MEDIA_TOKENS
from policies.admission.concurrency_limit import FIRST_HELD_S
from policies.admission.quota import Quota, QuotaLimits
from policies.routing_types import Request
from tests.metrics_page import total
from tests.unit.gateway.reload.running import Running, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

TENANTS = "tenants:\n  - {{name: a, key: sk-a, limits: {{{}}}}}\n  - {{name: b, key: sk-b}}\n"
CHAT = {"model": "demo-8b", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
IMAGES = 6


async def post(
    harness: Running, key: str, **more: object
) -> tuple[int, dict[str, str], dict[str, object]]:
    headers = {"Authorization": f"Bearer {key}"}
    async with harness.http.post(
        f"{harness.app.url}/v1/chat/completions", json=CHAT | more, headers=headers
    ) as answer:
        return answer.status, dict(answer.headers), await answer.json()


async def test_a_tenant_over_its_quota_gets_openais_rate_limit_error_and_others_do_not(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, more=TENANTS.format("requests_per_minute: 2")) as harness:
        assert [(await post(harness, "sk-a"))[0] for _ in range(2)] == [200, 200]
        status, headers, reply = await post(harness, "sk-a")
        error = reply["error"]
        assert isinstance(error, dict)
        assert (status, error["type"], error["code"]) == (
            429,
            "rate_limit_error",
            "tenant_rate_limited",
        )
        assert (
            headers["x-ratelimit-limit-requests"],
            headers["x-ratelimit-remaining-requests"],
        ) == ("2", "0")
        assert 0.0 < float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60.0
        assert 25_000 < int(headers["retry-after-ms"]) <= 30_000
        assert (await post(harness, "sk-b"))[0] == 200
        assert (await harness.put(harness.text(0) + TENANTS.format("requests_per_minute: 2")))[
            0
        ] == 200
        assert (await post(harness, "sk-a"))[0] == 429
        assert (await harness.put(harness.text(0) + TENANTS.format("")))[0] == 200
        assert (await post(harness, "sk-a"))[0] == 200


async def test_requests_that_no_engine_served_are_refunded(tmp_path: Path) -> None:
    async with running(tmp_path, more=TENANTS.format("tokens_per_minute: 3000")) as harness:
        for member in harness.members:
            member.faults.apply("5xx")
        for _ in range(4):
            assert (await post(harness, "sk-a", max_tokens=2000))[0] in (502, 503)


async def test_requests_that_no_engine_served_do_not_shorten_the_wait(tmp_path: Path) -> None:
    async with running(tmp_path, more=TENANTS.format("concurrent_requests: 1")) as harness:
        quotas = harness.app.gateway.gate.quotas
        concurrency = quotas.by_tenant["a"].concurrency
        assert concurrency is not None
        for _ in range(20):
            taken = quotas.take(Request("r", "demo-8b", "a", 100, 2000))
            assert taken is not None
            quotas.settle(taken, Request("r", "demo-8b", "a", 100, 2000), None)
        concurrency.take(1)
        assert concurrency.wait_s(1) == FIRST_HELD_S


async def test_tokens_that_a_short_response_did_not_use_are_refunded(tmp_path: Path) -> None:
    async with running(tmp_path, more=TENANTS.format("tokens_per_minute: 3000")) as harness:
        quotas = harness.app.gateway.gate.quotas
        request = Request("r", "demo-8b", "a", 100, 2000)
        for _ in range(7):
            taken = quotas.take(request)
            assert taken is not None
            quotas.settle(taken, request, 20)


async def test_a_quota_is_charged_what_the_engine_counted_of_a_prompt(tmp_path: Path) -> None:
    async with running(tmp_path, more=TENANTS.format("tokens_per_minute: 30000")) as made:
        quota = made.app.gateway.gate.quotas.by_tenant["a"]
        parts = [
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{number}" + "iVBORw0K" * 2500},
            }
            for number in range(IMAGES)
        ]
        status, _, answer = await post(made, "sk-a", messages=[{"role": "user", "content": parts}])
        assert status == 200
        usage: Any = answer["usage"]
        # The estimate must differ from the real usage, or the correction could not be seen.
        assert abs(usage["prompt_tokens"] - IMAGES * MEDIA_TOKENS) > 500
        bucket = quota._tokens
        assert bucket is not None
        assert bucket._level == pytest.approx(30_000 - usage["total_tokens"], abs=100)


def test_a_quota_keeps_the_estimate_where_the_engine_does_not_count() -> None:
    quotas, request = Quotas(), Request("r", "m", "a", 100, 20)
    quota = quotas.by_tenant["a"] = Quota(QuotaLimits(None, 1000))
    for prompt_tokens, left in ((None, 890), (300, 580), (1, 569)):
        charge = quotas.take(request)
        assert charge is not None
        quotas.settle(charge, request, 10, prompt_tokens)
        bucket = quota._tokens
        assert bucket is not None
        assert bucket._level == pytest.approx(left, abs=5)


class Stream:
    """A tenant's streamed chat, whose client disconnects once `may_end` is set."""

    def __init__(self, harness: Running, key: str) -> None:
        self._harness, self._headers = harness, {"Authorization": f"Bearer {key}"}
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        body = CHAT | {"stream": True, "max_tokens": 4000, "ignore_eos": True}
        url = f"{self._harness.app.url}/v1/chat/completions"
        async with self._harness.http.post(url, json=body, headers=self._headers) as answer:
            assert answer.status == 200
            async for _ in answer.content.iter_any():
                self.has_begun.set()
                if self.may_end.is_set():
                    return


@asynccontextmanager
async def streams(harness: Running, key: str, count: int) -> AsyncIterator[list[Stream]]:
    # Run `count` streams of a tenant, which all have begun, during the block.
    begun = [Stream(harness, key) for _ in range(count)]
    async with asyncio.TaskGroup() as tasks:
        for stream in begun:
            tasks.create_task(stream.run())
        for stream in begun:
            await stream.has_begun.wait()
        try:
            yield begun
        finally:
            for stream in begun:
                stream.may_end.set()


def in_progress(harness: Running) -> int:
    limit = harness.app.gateway.gate.quotas.by_tenant["a"].concurrency
    assert limit is not None
    return limit.in_progress


async def test_a_tenant_has_at_most_so_many_requests_in_progress_and_others_have_no_limit(
    tmp_path: Path,
) -> None:
    more = TENANTS.format("concurrent_requests: 2")
    async with running(tmp_path, more=more, speed=1.0) as harness:
        async with streams(harness, "sk-a", 2) as (first, _):
            status, headers, reply = await post(harness, "sk-a")
            error = reply["error"]
            assert isinstance(error, dict)
            assert (status, error["type"]) == (429, "rate_limit_error")
            assert error["code"] == "tenant_concurrency_limited"
            assert "limited to 2 concurrent requests; 2 are in progress" in error["message"]
            assert "x-should-retry" not in headers
            assert 0 < int(headers["retry-after-ms"]) <= 60_000
            assert (await post(harness, "sk-b"))[0] == 200
            page = harness.app.metrics.render().decode()
            assert total(page, "penstock_tenant_inflight", tenant="a") == 2.0
            assert total(page, "penstock_shed_total", reason="tenant_concurrency_limited") == 1.0
            first.may_end.set()
            while in_progress(harness) > 1:
                await asyncio.sleep(0.01)
            assert (await post(harness, "sk-a"))[0] == 200
        while in_progress(harness):
            await asyncio.sleep(0.01)


async def test_messages_over_the_limit_get_anthropics_error_and_counts_of_tokens_are_served(
    tmp_path: Path,
) -> None:
    more = TENANTS.format("concurrent_requests: 1")
    async with running(tmp_path, more=more, speed=1.0) as harness, streams(harness, "sk-a", 1):
        url, headers = f"{harness.app.url}/v1/messages", {"x-api-key": "sk-a"}
        async with harness.http.post(url, json=CHAT, headers=headers) as answer:
            reply = await answer.json()
            assert (answer.status, reply["type"]) == (429, "error")
            assert reply["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
        async with harness.http.post(f"{url}/count_tokens", json=CHAT, headers=headers) as answer:
            assert answer.status == 200


async def test_a_reload_changes_the_limit_and_keeps_the_requests_in_progress(
    tmp_path: Path,
) -> None:
    more = TENANTS.format("concurrent_requests: 1")
    async with running(tmp_path, more=more, speed=1.0) as harness, streams(harness, "sk-a", 1):
        for limit, status in (("2", 200), ("1", 429), ("3", 200)):
            text = harness.text(0) + TENANTS.format(f"concurrent_requests: {limit}")
            assert (await harness.put(text))[0] == 200
            assert (await post(harness, "sk-a"))[0] == status
        assert (await harness.put(harness.text(0) + TENANTS.format("")))[0] == 200
        assert (await post(harness, "sk-a"))[0] == 200
        assert "penstock_tenant_inflight{" not in harness.app.metrics.render().decode()


async def test_requests_that_fail_or_are_refused_give_their_place_back(tmp_path: Path) -> None:
    limits = "concurrent_requests: 1, requests_per_minute: 8"
    async with running(tmp_path, more=TENANTS.format(limits)) as harness:
        for member in harness.members:
            member.faults.apply("5xx")
        for _ in range(3):
            assert (await post(harness, "sk-a"))[0] in (502, 503)
        for member in harness.members:
            member.faults.clear()
        assert in_progress(harness) == 0


def test_requests_of_batches_do_not_count_as_requests_in_progress() -> None:
    quotas, request = Quotas(), Request("r", "m", "a", 100, 20)
    quota = quotas.by_tenant["a"] = Quota(QuotaLimits(10, None, 1))
    charges = [quotas.take(request, is_concurrent=False) for _ in range(3)]
    assert quota.concurrency is not None
    assert quota.concurrency.in_progress == 0
    assert quotas.take(request) is not None
    for charge in charges:
        assert charge is not None
        quotas.settle(charge, request, 20)
    assert quota.concurrency.in_progress == 1
    assert quota.levels(monotonic())[0] == pytest.approx(6.0, abs=0.1)
