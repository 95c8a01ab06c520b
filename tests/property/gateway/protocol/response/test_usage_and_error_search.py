"""Property tests that token counts and finish reasons are found in streams, however they are
split.
"""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol.response.usage_and_error_search import (
    TokenUsage,
    find_finish_reason,
    find_usage,
)

_COUNTS = {
    name: re.compile(rb'"%b":\s*(\d{1,15})(?!\d)' % name.encode())
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
}
PIECES = st.sampled_from(
    [
        *(b'"finish_reason":', b'"finish_reason": ', b'"stop"', b'"length"', b'"odd_reason"'),
        *(b"null", b"{", b"}", b",", b'"', b"stop", b'"tool_calls"', b"x", b" "),
        *(b'"usage":', b'{"prompt_tokens":12,"completion_tokens":3,"total_tokens":15}', b"null"),
        b'{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":8},"completion_tokens":3}',
        b'{"prompt_tokens": 9, "total_tokens": 9}',
    ]
)
TEXTS = st.lists(PIECES, max_size=14).map(b"".join)


@given(TEXTS)
@example(b'"finish_reason":"stop"')
@example(b'"finish_reason":"stop"},{"finish_reason":null}')
@example(b'"finish_reason":"stop')
@example(b'"stop"')
@example(b'"finish_reason":"finish_reason":"stop"')
def test_the_last_finish_reason_is_found(text: bytes) -> None:
    # A lookahead also finds overlapping matches.
    reasons = re.findall(rb'(?="finish_reason": ?"(\w+)")', text)
    assert find_finish_reason(text) == (reasons[-1].decode() if reasons else None)


@given(TEXTS.map(lambda text: text.replace(b'"usage":null', b"")))
def test_counts_after_the_last_usage_are_found(text: bytes) -> None:
    _, found, rest = text.rpartition(b'"usage":')
    whole = re.match(rb'{"prompt_tokens": ?\d+[^{}]*}', rest)
    scope = whole[0] if whole else rest
    counts = {name: pattern.search(scope) for name, pattern in _COUNTS.items()}
    expected = {name: None if match is None else int(match[1]) for name, match in counts.items()}
    assert find_usage(text) == (TokenUsage(**expected) if found else TokenUsage())
