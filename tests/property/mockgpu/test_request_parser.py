"""Property tests that the mock engine accepts any JSON request or answers with a 4xx status.

It never crashes.
"""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from mockgpu.http.choice_and_stop_reason import build_choices
from mockgpu.http.openai_format import full_response
from mockgpu.mock_tokenizer import token_count
from mockgpu.request_parser import (
    ApiError,
    ParsedRequest,
    RequestBody,
    check_handoff,
    decode_body,
    parse_request,
)

scalars = st.none() | st.booleans() | st.integers(-3, 50) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "function", "name", "type"]) | st.text(max_size=5),
            inner,
        )
    ),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(RequestBody.__struct_fields__), values, max_size=8)
sound = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "hi"}]), "prompt": st.just("hi")}
)


def read(raw: bytes, chat: bool = True) -> ParsedRequest | ApiError:
    try:
        body = decode_body(raw, RequestBody)
        check_handoff(body, {})
        return parse_request(body, {}, chat, "m", 512, "id")
    except ApiError as error:
        return error


@given(bodies, sound, st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_body_is_answered_or_refused(
    fields: dict[str, object], base: dict[str, object], chat: bool, mixed: bool
) -> None:
    parsed = read(json.dumps(base | fields if mixed else fields).encode(), chat)
    if isinstance(parsed, ApiError):
        assert parsed.status in (400, 404, 500)
        assert json.loads(parsed.body())["error"]["code"] == parsed.status
        return
    choices = build_choices(parsed)
    assert all(1 <= choice.job.output_tokens <= parsed.limit for choice in choices)
    assert all(choice.job.prompt_tokens + choice.job.output_tokens <= 512 for choice in choices)
    assert all(choice.text == choice.tokens.decode()[: len(choice.text)] for choice in choices)
    answer = json.loads(full_response(parsed, choices, 1, 0))
    assert answer["usage"]["completion_tokens"] == sum(
        token_count(choice.tokens) for choice in choices
    )


@given(st.binary(max_size=60))
def test_bytes_that_are_no_request_are_refused(raw: bytes) -> None:
    refusal = read(raw)
    assert isinstance(refusal, ApiError)
    assert refusal.status == 400
