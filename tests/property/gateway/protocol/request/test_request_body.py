"""Property tests of the request parser: it accepts or refuses any JSON, and changes little in
it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.protocol import api_table
from gateway.protocol.errors import GatewayError
from gateway.protocol.request.api_call import ENGINE_INTERNAL, Call
from gateway.protocol.request.json_members import SMALL_BODY_BYTES
from gateway.protocol.request.parameter_limits import MAX_MEMBER_BYTES, MAX_NUMBERS
from gateway.protocol.request.request_body import (
    BYTES_PER_TOKEN,
    EXTRA_ARGS,
    CallContext,
    parse_call,
)
from gateway.protocol.request.service_level_headers import NO_PREFERENCES
from policies.routing_types import STANDARD, Slo


class Model(NamedTuple):
    served_model: str = "demo"
    context_tokens: int | None = None
    slo: Slo = STANDARD
    is_low_first: bool = True
    sequences: int = 256


SPECIAL = {
    *ENGINE_INTERNAL,
    *MAX_NUMBERS,
    *MAX_MEMBER_BYTES,
    EXTRA_ARGS,
    "model",
    "messages",
    "prompt",
    "stream",
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
NAMES = (
    TEXT | st.sampled_from(["temperature", "a", "ab", "modél", 'q"uote', "back\\slash"])
).filter(lambda name: name not in SPECIAL)
OTHERS = st.dictionaries(NAMES, VALUES, max_size=6)
RNG = st.randoms(use_true_random=False)
Members = list[tuple[str, Any]]


def written(value: object, rng: Random) -> str:
    # Encode a value as JSON with random blanks and escapes.
    #
    # A tuple of pairs is encoded as an object, so that members may repeat.
    if isinstance(value, str):
        return '"' + "".join(_character(character, rng) for character in value) + '"'
    if isinstance(value, dict):
        return written(tuple(value.items()), rng)
    if isinstance(value, tuple):
        pairs = [
            f"{_blank(rng)}{written(k, rng)}{_blank(rng)}:{_blank(rng)}{written(v, rng)}"
            for k, v in value
        ]
        return "{" + ",".join(pair + _blank(rng) for pair in pairs) + "}"
    if isinstance(value, list):
        return (
            "[" + ",".join(_blank(rng) + written(item, rng) + _blank(rng) for item in value) + "]"
        )
    return json.dumps(value)


def _blank(rng: Random) -> str:
    return "".join(rng.choices(" \t\r\n", k=rng.choice((0, 0, 0, 1, 2))))


def _character(character: str, rng: Random) -> str:
    if character in '"\\' or character < " " or rng.random() < 0.2:
        escaped = json.dumps(character)[1:-1]
        if len(escaped) > 1 or rng.random() < 0.5:
            return escaped
        return f"\\u{ord(character):04{rng.choice('xX')}}"
    return character


def chat(others: dict[str, Any], rng: Random, model: str = "demo") -> Members:
    members: Members = [
        ("model", model),
        ("messages", [{"role": "user", "content": "hi"}]),
        *others.items(),
    ]
    rng.shuffle(members)
    return members


def parsed(body: bytes, api: api_table.Api = api_table.CHAT, served: str = "demo") -> Call:
    return parse_call(
        body,
        api,
        {"demo": Model(served), "other": Model("demo")},
        CallContext("req_1", "acme", NO_PREFERENCES, 0.0),
    )


def as_bytes(members: Members, rng: Random, compact: bool) -> bytes:
    if compact:
        return json.dumps(
            dict(members), separators=(",", ":"), ensure_ascii=rng.random() < 0.5
        ).encode()
    return (_blank(rng) + written(tuple(members), rng) + _blank(rng)).encode()


@settings(deadline=None)
@given(OTHERS, RNG, st.booleans())
def test_a_body_passes_unchanged_when_nothing_must_change(
    others: dict[str, Any], rng: Random, compact: bool
) -> None:
    body = as_bytes(chat(others, rng), rng, compact)
    call = parsed(body)
    assert call.body is body
    assert (call.requested_model, call.request.model, call.request.tenant) == (
        "demo",
        "demo",
        "acme",
    )


@settings(deadline=None)
@given(OTHERS, st.sets(st.sampled_from(sorted(ENGINE_INTERNAL))), VALUES, RNG, st.booleans())
def test_exactly_the_engine_internal_members_are_dropped(
    others: dict[str, Any], internal: set[str], value: Any, rng: Random, compact: bool
) -> None:
    members = chat(others | dict.fromkeys(sorted(internal), value), rng)
    outbound = json.loads(parsed(as_bytes(members, rng, compact)).body)
    assert outbound == {name: value for name, value in members if name not in internal}


@settings(deadline=None)
@given(OTHERS, OTHERS, st.sets(st.sampled_from(sorted(ENGINE_INTERNAL))), RNG)
def test_engine_internal_members_are_dropped_from_extra_arguments(
    others: dict[str, Any], extra: dict[str, Any], internal: set[str], rng: Random
) -> None:
    xargs = extra | dict.fromkeys(sorted(internal), "x")
    body = as_bytes(chat({**others, EXTRA_ARGS: xargs}, rng), rng, compact=False)
    call = parsed(body)
    assert json.loads(call.body)[EXTRA_ARGS] == extra
    assert (call.body is body) == (not internal)


@settings(deadline=None)
@given(OTHERS, RNG, st.booleans())
def test_an_alias_or_an_engines_own_name_changes_only_the_model(
    others: dict[str, Any], rng: Random, compact: bool
) -> None:
    members = chat(others, rng, model="other")
    call = parsed(as_bytes(members, rng, compact))
    assert call.requested_model == "other"
    assert json.loads(call.body) == dict(members) | {"model": "demo"}
    named = call.adapted_to('an "engine\'s" näme\n', None)
    assert json.loads(named.body) == dict(members) | {"model": 'an "engine\'s" näme\n'}
    assert named.request == call.request


@settings(deadline=None)
@given(OTHERS, RNG, st.booleans())
def test_an_engine_that_rejects_unknown_members_gets_only_known_ones(
    others: dict[str, Any], rng: Random, compact: bool
) -> None:
    call = parsed(as_bytes(members := chat(others, rng), rng, compact))
    known = frozenset(
        {"model", "messages", "stop", *(name for name in others if rng.random() < 0.5)}
    )
    fitted = call.adapted_to("demo", known)
    assert json.loads(fitted.body) == {
        name: value for name, value in dict(members).items() if name in known
    }
    assert (fitted is call) == (dict(members).keys() <= known)


@settings(max_examples=150, deadline=None)
@given(OTHERS, RNG, st.data())
def test_a_duplicate_member_is_rejected_in_any_formatting(
    others: dict[str, Any], rng: Random, data: st.DataObject
) -> None:
    members = chat(others, rng)
    assert json.loads(parsed(as_bytes(members, rng, compact=False)).body) == dict(members)
    name, value = data.draw(st.sampled_from(members))
    again = data.draw(st.just(value) | VALUES)
    members.insert(data.draw(st.integers(0, len(members))), (name, again))
    blanks = b" " * SMALL_BODY_BYTES  # large bodies take another path
    compact = _compact(members)
    for body in (as_bytes(members, rng, compact=False), compact, compact + blanks):
        with pytest.raises(GatewayError) as refused:
            parsed(body)
        assert (refused.value.status, refused.value.param) == (400, name)
        assert "twice" in refused.value.message


def _compact(members: Members) -> bytes:
    return (
        "{"
        + ",".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in members)
        + "}"
    ).encode()


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), RNG)
def test_text_is_counted_by_its_bytes(text: str, rng: Random) -> None:
    prompt = written(text, rng)
    call = parsed(f'{{"model":"demo","prompt":{prompt}}}'.encode(), api_table.COMPLETIONS)
    assert call.request.prompt_tokens == len(prompt.encode()) // BYTES_PER_TOKEN + 1
    assert [bytes(part) for part in call.prompt] == [prompt.encode()]


@settings(deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=200), RNG)
def test_token_ids_are_counted_exactly(ids: list[int], rng: Random) -> None:
    body = f'{{"model":"demo","prompt":{written(ids, rng)}}}'.encode()
    assert parsed(body, api_table.COMPLETIONS).request.prompt_tokens == len(ids)


@settings(deadline=None)
@given(st.binary(max_size=64))
@example(b"")
@example(b"\xff")
@example(b'{"model":"\\ud800"}')
def test_any_bytes_are_rejected_with_400_or_404(body: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        parsed(body)
    assert refused.value.status in (400, 404)


@settings(max_examples=150, deadline=None)
@given(
    OTHERS, RNG, st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=3)), min_size=1, max_size=4)
)
def test_a_damaged_body_is_rejected_or_still_a_json_object(
    others: dict[str, Any], rng: Random, damage: list[tuple[float, bytes]]
) -> None:
    body = as_bytes(chat(others, rng), rng, compact=False)
    for where, piece in damage:
        position = int(where * len(body))
        body = body[:position] + piece + body[position + len(piece) :]
    with suppress(GatewayError):
        call = parsed(body)
        assert isinstance(json.loads(call.body.decode()), dict)
