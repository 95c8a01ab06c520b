"""Any JSON is either a valid request or an ApiError with a client status, never a crash."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from mockgpu.choice import choices_of
from mockgpu.openai_format import whole
from mockgpu.request_parser import ApiError, Ask, Body, ask_of, check_handoff, decoded
from mockgpu.text import token_count

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
bodies = st.dictionaries(st.sampled_from(Body.__struct_fields__), values, max_size=8)
sound = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "hi"}]), "prompt": st.just("hi")}
)


def read(raw: bytes, chat: bool = True) -> Ask | ApiError:
    try:
        body = decoded(raw, Body)
        check_handoff(body, {})
        return ask_of(body, {}, chat, "m", 512, "id")
    except ApiError as error:
        return error


@given(bodies, sound, st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_body_is_answered_or_refused(
    fields: dict[str, object], base: dict[str, object], chat: bool, mixed: bool
) -> None:
    ask = read(json.dumps(base | fields if mixed else fields).encode(), chat)
    if isinstance(ask, ApiError):
        assert ask.status in (400, 404, 500)
        assert json.loads(ask.body())["error"]["code"] == ask.status
        return
    choices = choices_of(ask)
    assert all(1 <= choice.job.output_tokens <= ask.limit for choice in choices)
    assert all(choice.job.prompt_tokens + choice.job.output_tokens <= 512 for choice in choices)
    assert all(choice.text == choice.tokens.decode()[: len(choice.text)] for choice in choices)
    answer = json.loads(whole(ask, choices, 1, 0))
    assert answer["usage"]["completion_tokens"] == sum(
        token_count(choice.tokens) for choice in choices
    )


@given(st.binary(max_size=60))
def test_bytes_that_are_no_request_are_refused(raw: bytes) -> None:
    refusal = read(raw)
    assert isinstance(refusal, ApiError)
    assert refusal.status == 400
