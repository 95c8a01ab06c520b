"""Tests of when a split request's prompt counts as cached at its decode endpoint."""

from __future__ import annotations

import msgspec
import pytest

from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.reservation import DecodeReservation
from planner.replay.trace_fingerprint import fingerprint_of_chain
from policies.prefix.fingerprint import Fingerprint
from policies.routing_types import Pick, Request
from tests.unit.gateway.fleet.tables import table_of

TOKENS = 1024
STREAM = Request(id="r", tenant="", model="m", prompt_tokens=TOKENS, output_tokens=20, stream=True)
WHOLE = msgspec.structs.replace(STREAM, stream=False)
PROMPT = fingerprint_of_chain((11, 12, 13, 14), 512, 4 * 512, 0)


def table() -> EndpointTable:
    return table_of(["http://127.0.0.1:1", "http://127.0.0.1:2"])[0]


def reserve(
    table: EndpointTable, request: Request = STREAM, prompt: Fingerprint | None = PROMPT
) -> DecodeReservation:
    (candidates,) = table._pools.values()
    return table.reserve_decode(Pick(candidates[1], 0, 0.0, 2, "test"), request, prompt)


def cached_tokens(table: EndpointTable, prompt: Fingerprint = PROMPT) -> int:
    # Return the prompt tokens that the decode endpoint is believed to have cached.
    (candidates,) = table._pools.values()
    found = table.prefixes.cached_tokens(prompt, TOKENS)
    slot = candidates[1].load.slot
    return found[slot] if slot < len(found) else 0


async def test_a_stream_teaches_its_prompt_with_the_first_token() -> None:
    pool = table()
    with reserve(pool) as reservation:
        assert cached_tokens(pool) == 0
        reservation.on_handed_over()
        assert cached_tokens(pool) == 0
        reservation.on_first_token()
        assert cached_tokens(pool) == TOKENS
    assert cached_tokens(pool) == TOKENS


async def test_a_whole_answer_teaches_its_prompt_when_the_transfer_begins() -> None:
    pool = table()
    with reserve(pool, WHOLE) as reservation:
        assert cached_tokens(pool) == 0
        reservation.on_handed_over()
        assert cached_tokens(pool) == TOKENS
        reservation.on_first_token()
    assert cached_tokens(pool) == TOKENS


async def test_a_prompt_that_the_decoder_computes_itself_is_learnt_immediately() -> None:
    pool = table()
    with reserve(pool) as reservation:
        reservation.on_recompute()
        assert cached_tokens(pool) == TOKENS
    # The request ended before its first token: the engine has not computed the prompt.
    assert cached_tokens(pool) == 0


async def test_a_transfer_that_fails_leaves_what_other_requests_taught() -> None:
    pool = table()
    with reserve(pool) as failing:
        with reserve(pool) as other:
            other.on_first_token()
        assert cached_tokens(pool) == TOKENS
        failing.on_handed_over()
    assert cached_tokens(pool) == TOKENS


@pytest.mark.parametrize("request_", [STREAM, WHOLE])
async def test_a_prompt_learnt_after_others_taught_it_leaves_theirs_if_it_fails(
    request_: Request,
) -> None:
    pool = table()
    with reserve(pool, request_) as failing:
        with reserve(pool) as other:
            other.on_first_token()
        if request_.stream:
            failing.on_recompute()
        else:
            failing.on_handed_over()
    assert cached_tokens(pool) == TOKENS


async def test_a_request_without_a_fingerprint_teaches_nothing() -> None:
    pool = table()
    with reserve(pool, prompt=None) as reservation:
        reservation.on_first_token()
    assert cached_tokens(pool) == 0


# Pulls


@pytest.mark.parametrize("request_", [STREAM, WHOLE])
async def test_the_rest_of_a_pulled_prompt_is_computed_when_its_beginning_is_on_its_way(
    request_: Request,
) -> None:
    pool = table()
    (candidates,) = pool._pools.values()
    load, pick = candidates[1].load, Pick(candidates[1], 900, 0.0, 2, "test")
    with pool.reserve_decode(pick, request_, PROMPT, 800) as reservation:
        assert load.prefill_tokens == 0
        reservation.on_handed_over()
        assert load.prefill_tokens == TOKENS - 900
        assert cached_tokens(pool) == 0
        reservation.on_first_token()
        assert cached_tokens(pool) == TOKENS
        assert reservation.has_visible_first_token == request_.stream
    assert (load.prefill_tokens, load.in_flight) == (0, 0)
    assert cached_tokens(pool) == TOKENS


async def test_all_but_the_endpoints_own_tokens_are_computed_if_a_pull_fails() -> None:
    pool = table()
    (candidates,) = pool._pools.values()
    load, pick = candidates[1].load, Pick(candidates[1], 900, 0.0, 2, "test")
    with pool.reserve_decode(pick, STREAM, PROMPT, 800) as reservation:
        reservation.on_recompute()
        assert load.prefill_tokens == TOKENS - 100
    assert load.prefill_tokens == 0
