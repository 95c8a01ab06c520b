"""The refusal when no endpoint is left: how the last attempt failed, and whether to retry."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.unit.gateway.disagg.halves import MODEL, Front, Script, decodes, front, holds, refuses

SHORT, LONG = 64, 4096  # tokens of context


def whole(engines: Sequence[Script], **options: Any) -> AbstractAsyncContextManager[Front]:
    """A gateway whose engines serve whole requests."""
    models = [{"name": MODEL, "pool": "main"}]
    return front("vllm_nixl", [], list(engines), models=models, decode_role="both", **options)


@pytest.mark.parametrize("engines", [1, 2])
async def test_a_request_whose_last_engine_was_silent_is_refused_as_a_timeout(engines: int) -> None:
    async with whole([holds] * engines, timeouts={"first_byte": "100ms"}) as running:
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
        endpoints.drain(next(each for each in endpoints.all() if each.endpoint.context_tokens == LONG), wanted=True)
        reply = await running.ask(words=400)
        assert (reply.status, reply.json["error"]["code"]) == (503, "no_capacity")
        assert (await running.ask(words=3)).status == 200


async def test_a_split_request_that_fits_no_engine_is_too_long() -> None:
    async with front("vllm_nixl", [], [decodes] * 2, decode_role="both", contexts=[SHORT, SHORT]) as running:
        assert (await running.ask(words=400)).status == 400
