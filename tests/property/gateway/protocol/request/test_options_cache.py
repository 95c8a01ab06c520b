"""Property tests that requests are parsed equally with and without the cache of request shapes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol import api_table
from gateway.protocol.errors import GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.options_cache import MAX_SHAPES, OptionsCache
from gateway.protocol.request.request_body import CallContext, CallShape, parse_call
from gateway.protocol.request.service_level_headers import NO_PREFERENCES
from tests.property.gateway.protocol.request.test_request_body import Model

MODELS = {"demo": Model(), "alias": Model(), "short": Model("short", 4096)}
CONTEXT = CallContext("req_1", "", NO_PREFERENCES, 1.0)

# Pieces whose concatenation is often valid JSON, and often JSON that a naive search misreads.
PIECES = st.sampled_from(
    [
        *('{"messages":[', '"messages":[', ',"messages":', '{"model":"demo",', ',"model":"demo"'),
        *(
            '"a"',
            "[",
            "]",
            "{",
            "}",
            ",",
            ":",
            '"',
            "\\",
            '\\"',
            "1",
            "[1]",
            '["x"]',
            '"],"',
            '":"',
        ),
        *(
            ',"n":2',
            ',"max_tokens":7',
            ',"max_tokens":"7"',
            ',"stream":true',
            ',"priority":3',
            "}}",
        ),
        *(
            ',"kv_transfer_params":{}',
            ',"metadata":{"messages":[1]}',
            ' ,"user":"u"',
            '{"role":"u"}',
        ),
    ]
)
MEMBERS = st.dictionaries(
    st.sampled_from(
        ["n", "max_tokens", "stream", "user", "temperature", "metadata", "],", "priority"]
    ),
    st.sampled_from([1, 2, 9000, True, "x", ",", "],", {"messages": [1]}, [3]]),
    max_size=4,
)
CONVERSATIONS = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=6)}), max_size=3
)


def outcome(body: bytes, shapes: OptionsCache[CallShape] | None) -> Call | tuple[int, str]:
    # Parse a request; return the parsed call, or the status and text of the error.
    try:
        return parse_call(body, api_table.CHAT, MODELS, CONTEXT, shapes=shapes)
    except GatewayError as error:
        return error.status, error.message


def compact(members: dict[str, Any]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


@given(
    st.lists(MEMBERS, min_size=1, max_size=3),
    st.lists(MEMBERS, min_size=1, max_size=3),
    st.lists(CONVERSATIONS, min_size=1, max_size=4),
)
def test_a_known_shape_is_parsed_like_an_unknown_one(
    before: list[dict[str, Any]], after: list[dict[str, Any]], conversations: list[Any]
) -> None:
    shapes: OptionsCache[CallShape] = OptionsCache()
    for first in before:
        for last in after:
            for conversation in conversations:
                rest = {name: value for name, value in last.items() if name not in first}
                body = compact({"model": "demo", **first, "messages": conversation, **rest})
                assert outcome(body, shapes) == outcome(body, None)


@given(st.lists(st.lists(PIECES, min_size=1, max_size=9), min_size=2, max_size=6))
@example(
    [
        ['{"messages":[', "]", ',"model":"demo"', ',"metadata":{"messages":[1]}', "}"],
        ['{"messages":[', "1", ',"model":"demo"', ',"metadata":{"messages":[1]}', "}"],
    ]
)
def test_no_body_is_read_by_the_shape_of_another(texts: list[list[str]]) -> None:
    shapes: OptionsCache[CallShape] = OptionsCache()
    valid = b'{"messages":[{"role":"u"}],"model":"demo","],":":1,"}'
    assert isinstance(outcome(valid, shapes), Call)
    bodies = ["".join(pieces).encode() for pieces in texts]
    for body in (*bodies, *(valid[:13] + body + valid[27:] for body in bodies)):
        assert outcome(body, shapes) == outcome(body, None)


def test_the_shape_of_an_ordinary_request_is_cached_once() -> None:
    shapes: OptionsCache[CallShape] = OptionsCache()
    for text in ("one", "another", "a third"):
        conversation = [{"role": "user", "content": text}]
        assert isinstance(
            outcome(compact({"model": "demo", "messages": conversation}), shapes), Call
        )
    assert len(shapes) == 1


def test_a_request_is_not_cached_whose_body_changes_or_names_a_session() -> None:
    shapes: OptionsCache[CallShape] = OptionsCache()
    for members in (
        {"model": "alias", "cache_salt": "x"},
        {"model": "alias"},
        {"model": "demo", "prompt_cache_key": "k"},
        {"model": "demo", "tools": []},
        {"model": "demo", "max_tokens": "7"},
    ):
        outcome(compact({**members, "messages": []}), shapes)
    assert len(shapes) == 0


def test_the_cache_stays_bounded() -> None:
    shapes: OptionsCache[CallShape] = OptionsCache()
    for number in range(2 * MAX_SHAPES + 5):
        outcome(compact({"messages": [], "model": "demo", "user": str(number)}), shapes)
    assert 0 < len(shapes) <= MAX_SHAPES


def test_a_conversation_that_is_no_list_is_not_cached() -> None:
    shapes: OptionsCache[CallShape] = OptionsCache()
    outcome(compact({"messages": 1, "model": "demo"}), shapes)
    assert len(shapes) == 0
