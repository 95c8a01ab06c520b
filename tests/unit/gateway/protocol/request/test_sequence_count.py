"""Tests that each prompt of a request with several prompts counts for limits and quotas."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.quota_charges import Quotas
from gateway.config import Tenant
from gateway.protocol import api_table
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.request_body import CallContext, parse_call
from gateway.protocol.request.sequence_count import SLICE, _count_strings
from gateway.protocol.request.service_level_headers import NO_PREFERENCES
from policies.routing_types import STANDARD, Slo
from tests.duration_limits import Stopwatch, pace

MOST = 256
MIB = 2**20


class Model(NamedTuple):
    served_model: str = "demo"
    context_tokens: int | None = None
    slo: Slo = STANDARD
    is_low_first: bool = True
    sequences: int = MOST


def completion(prompt: bytes, **others: Any) -> bytes:
    return (
        b'{"model":"demo","prompt":'
        + prompt
        + b","
        + json.dumps({"max_tokens": 7, **others}).encode()[1:]
    )


def parsed(prompt: Any, most: int = MOST, context_tokens: int | None = None, **others: Any) -> Call:
    body = completion(
        prompt if isinstance(prompt, bytes) else json.dumps(prompt).encode(), **others
    )
    model = Model(context_tokens=context_tokens, sequences=most)
    return parse_call(
        body,
        api_table.COMPLETIONS,
        {"demo": model},
        CallContext("req_1", "acme", NO_PREFERENCES, 0.0),
    )


def refusal(prompt: Any, most: int = MOST, **others: Any) -> GatewayError:
    with pytest.raises(GatewayError) as refused:
        parsed(prompt, most, **others)
    assert refused.value.failure is Failure.BAD_REQUEST
    return refused.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a, b", 1),
        ([], 1),
        ([[]], 1),
        (["a"], 1),
        (["a", "b, [c]"], 2),
        (['quote " and slash \\', "\\\\", "\n"], 3),
        ([1, 2, 3], 1),
        ([[1, 2, 3]], 1),
        ([[1, 2], [], [3]], 3),
        (b' [ "a" ,\n "b" ] ', 2),
        (b" [" + b" " * 100 + b"1, 2 ]", 1),
        (b"[ [ 1 , 2 ] , [ 3 ] ]", 2),
        (None, 1),
    ],
)
def test_every_prompt_of_a_list_is_a_sequence(prompt: Any, prompts: int) -> None:
    request = parsed(prompt).request
    assert (request.prompts, request.choices, request.output_tokens) == (
        prompts,
        prompts,
        7 * prompts,
    )
    request = parsed(prompt, n=3).request
    assert (request.prompts, request.choices, request.output_tokens) == (
        prompts,
        3 * prompts,
        21 * prompts,
    )


@pytest.mark.parametrize("prompt", [["a"], [[1]]])
def test_sequences_are_limited_over_prompts_and_choices(prompt: list[Any]) -> None:
    assert parsed(prompt * MOST).request.choices == MOST
    assert refusal(prompt * (MOST + 1)).param == "prompt"
    assert parsed(prompt * 64, n=4).request.choices == MOST
    assert refusal(prompt * 64, n=5).message == (
        "The request asks for 320 sequences or more (prompts x choices). "
        "One request may ask for at most 256."
    )
    assert parsed(prompt * 64, best_of=4, n=2).request.choices == 128
    assert refusal(prompt * 64, best_of=5).param == "prompt"


def test_choices_of_a_single_prompt_are_limited() -> None:
    assert parsed("a", most=8, n=8).request.choices == 8
    assert refusal("a", most=8, n=9).param == "n"
    assert refusal("a", most=8, best_of=9).param == "best_of"


def test_prompt_embeddings_count_in_addition_to_prompts() -> None:
    assert parsed(["a"], prompt_embeds=["x"] * 3).request.prompts == 4
    assert parsed("a", prompt_embeds="x").request.prompts == 1
    assert refusal("a", prompt_embeds=["x"] * MOST).param == "prompt"


@pytest.mark.parametrize(
    "prompt", [[[]] * 257, [{"a": "b"}] * 129, [1, *["a"] * 257], [["a"] * 257]]
)
def test_an_invalid_list_is_limited_too(prompt: list[Any]) -> None:
    assert refusal(prompt).param == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [
        b"[" + b'"",' * 2**21 + b'""]',
        b"[" + b"[1]," * 2**21 + b"[1]]",
        b"[" + b'"' + b'\\"' * 2**21 + b'"' + b',""' * MOST + b"]",
    ],
    ids=["strings", "lists", "escaped quotes"],
)
def test_millions_of_prompts_are_rejected_without_decoding(prompt: bytes) -> None:
    took = Stopwatch()
    refusal(prompt)
    assert took.fair_s < 0.5 * pace()


def test_counting_prompts_stops_above_the_limit() -> None:
    prompt = b"[" + b'"",' * 2**21 + b'""]'
    assert 256 < _count_strings(prompt, 256) < SLICE


@given(st.binary(max_size=40).map(lambda end: b'\\"' * (SLICE // 2 - 10) + end.replace(b'"', b"")))
def test_an_escape_at_the_end_of_a_slice_is_counted_as_one(text: bytes) -> None:
    # An odd number of backslashes at the end would escape the closing quote.
    inside = text[: len(text) - (len(text) - len(text.rstrip(b"\\"))) % 2]
    assert _count_strings(b'["' + inside + b'","b"]', 256) == 2


def test_a_tenants_quota_counts_every_prompt_as_a_request() -> None:
    quotas = Quotas()
    quotas.configure(
        [
            Tenant.model_validate(
                {"name": "acme", "key": "k" * 16, "limits": {"requests_per_minute": 10}}
            )
        ]
    )
    quota = quotas.take(parsed(["a"] * 8).request)
    assert quota is not None
    with pytest.raises(GatewayError, match="2 are left"):
        quotas.take(parsed(["a"] * 3).request)
    quotas.settle(quota, parsed(["a"] * 8).request, None)
    assert quotas.take(parsed(["a"] * 10).request) is not None
