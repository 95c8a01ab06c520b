"""Tests of quotas for the whole gateway: refusals, refunds, and reloads that keep their state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.admission.quotas import Quotas
from gateway.protocol.request.media import MEDIA_TOKENS
from policies.admission.quota import Quota, QuotaLimits
from policies.routing_types import Request
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
        assert quotas.take(request) is quota
        quotas.settle(quota, request, 10, prompt_tokens)
        bucket = quota._tokens
        assert bucket is not None
        assert bucket._level == pytest.approx(left, abs=5)
