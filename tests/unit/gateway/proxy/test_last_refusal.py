"""Tests of the client's error when no endpoint is left: its cause, and whether to retry."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.disagg.scripted_engines import (
    MODEL,
    Script,
    SplitGateway,
    decodes,
    never_answers,
    refuses,
    split_gateway,
    when_open,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

SHORT, LONG = 64, 4096  # context lengths in tokens


def whole(engines: Sequence[Script], **options: Any) -> AbstractAsyncContextManager[SplitGateway]:
    models = [{"name": MODEL, "pool": "main"}]
    return split_gateway(
        "vllm_nixl", [], list(engines), models=models, decode_role="both", **options
    )


@pytest.mark.parametrize("engines", [1, 2])
async def test_a_request_whose_last_engine_was_silent_is_refused_as_a_timeout(engines: int) -> None:
    async with whole([never_answers] * engines, timeouts={"first_byte": "100ms"}) as running:
        reply = await running.ask(words=3)
        assert (reply.status, reply.json["error"]["code"]) == (504, "upstream_timeout")
        await running.at_rest()


async def test_a_prompt_that_fits_no_engine_is_too_long_and_not_to_be_retried() -> None:
    async with whole([decodes] * 2, contexts=[SHORT, SHORT]) as running:
        reply = await running.ask(words=400)
        assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
        assert reply.headers["x-should-retry"] == "false"


async def test_a_prompt_that_fits_only_an_engine_that_failed_is_not_too_long() -> None:
    async with whole([decodes, refuses(500)], contexts=[SHORT, LONG]) as running:
        reply = await running.ask(words=400)
        assert (reply.status, reply.json["error"]["code"]) == (502, "upstream_failed")


async def test_a_prompt_that_fits_only_a_drained_engine_may_be_retried() -> None:
    async with whole([decodes, decodes], contexts=[SHORT, LONG]) as running:
        endpoints = running.app.gateway.endpoints
        endpoints.set_drained(
            next(each for each in endpoints.all() if each.endpoint.context_tokens == LONG),
            is_drained=True,
        )
        reply = await running.ask(words=400)
        assert (reply.status, reply.json["error"]["code"]) == (503, "no_capacity")
        assert (await running.ask(words=3)).status == 200


async def test_an_admission_without_limits_serves_more_requests_than_endpoints_have_places() -> (
    None
):
    opened = asyncio.Event()
    engines = [when_open(opened, decodes)] * 2
    async with whole(engines, max_concurrency=1, admission="none") as running:
        asked = [asyncio.ensure_future(running.ask(words=3)) for _ in range(6)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(len(engine.requests) for engine in running.decode) < len(asked):
                await asyncio.sleep(0.005)
        opened.set()
        assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * 6


async def test_a_request_with_a_permit_is_served_when_a_second_attempt_took_the_last_place() -> (
    None
):
    async with whole([decodes], max_concurrency=1) as running:
        load = next(iter(running.app.gateway.endpoints.all())).load
        load.in_flight += 1  # a hedge counts in the load too, but has no permit of its own
        load.mark_changed()
        reply = await running.ask(words=3)
        load.in_flight -= 1
        assert (reply.status, reply.text) == (200, "one two three")


async def test_a_split_request_that_fits_no_engine_is_too_long() -> None:
    async with split_gateway(
        "vllm_nixl", [], [decodes] * 2, decode_role="both", contexts=[SHORT, SHORT]
    ) as running:
        assert (await running.ask(words=400)).status == 400


def image(base64_bytes: int) -> dict[str, Any]:
    part = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * (base64_bytes // 8)},
    }
    return {"role": "user", "content": [part]}


@pytest.mark.parametrize("base64_bytes", [200_000, 3_000_000])
@pytest.mark.parametrize("split", [False, True])
async def test_an_image_goes_to_the_longest_context_and_its_engine_decides(
    base64_bytes: int, split: bool
) -> None:
    sections: dict[str, Any] = {} if split else {"models": [{"name": MODEL, "pool": "main"}]}
    sections["contexts"] = [SHORT, 2 * SHORT]
    async with split_gateway(
        "vllm_nixl", [], [decodes, decodes], decode_role="both", **sections
    ) as running:
        reply = await running.ask(messages=[image(base64_bytes)])
        assert reply.status == 200
        short, long = running.decode
        assert (len(short.requests), len(long.requests)) == (0, 1)
        long.script = refuses(400)
        reply = await running.ask(messages=[image(base64_bytes)])
        assert (reply.status, reply.json["error"]["message"]) == (400, "as asked")


async def test_text_that_may_fit_by_its_tokenizer_is_sent_and_what_cannot_is_refused() -> None:
    async with whole([decodes], contexts=[SHORT]) as running:
        # A prompt of four times its estimate would fit.
        assert (await running.ask(words=4 * SHORT // 5)).status == 200
        assert (await running.ask(words=4 * SHORT)).status == 400
        assert (await running.ask(words=3, max_tokens=SHORT)).status == 400
        members: dict[str, Any] = {"path": "/v1/completions", "max_tokens": 8}
        assert (await running.ask(prompt=[7] * (SHORT - 8), **members)).status == 200
        assert (
            await running.ask(prompt=[7] * SHORT, **members)
        ).status == 400  # counted, not estimated


async def test_each_prompt_of_a_list_and_each_answer_has_a_context_of_its_own() -> None:
    async with whole([decodes], contexts=[SHORT]) as running:
        members: dict[str, Any] = {"path": "/v1/completions", "max_tokens": 8}
        assert (await running.ask(prompt=[[7] * 50] * 4, **members)).status == 200
        assert (await running.ask(prompt=["word " * 20] * 8, **members)).status == 200
        assert (await running.ask(words=3, n=16)).status == 200
