"""Property tests that a streamed answer is measured equally, however its bytes are split."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from planner.bench.answer_timeline import AnswerTimeline


def event(data: object, newline: str) -> bytes:
    return f"data: {json.dumps(data)}{newline}{newline}".encode()


def stream(words: list[str], newline: str) -> bytes:
    # Return a stream as vLLM sends it: role, words, finish, usage, [DONE], with a comment.
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    tokens = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
    finish = {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]}
    usage = {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": len(words), "total_tokens": 0},
    }
    events = b"".join(event(item, newline) for item in (role, *tokens, finish, usage))
    return (
        f": ping{newline}{newline}".encode() + events + f"data: [DONE]{newline}{newline}".encode()
    )


@given(
    st.lists(st.text(min_size=1), min_size=1, max_size=20),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(0, 5000), max_size=40),
)
def test_any_chunking_gives_the_same_tokens_text_usage_and_end(
    words: list[str], newline: str, cuts: list[int]
) -> None:
    data = stream(words, newline)
    places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    timeline = AnswerTimeline()
    for now, (start, end) in enumerate(pairwise(places)):
        timeline.feed(data[start:end], float(now))
    assert timeline.text == "".join(words)
    assert timeline.tokens == len(words)
    assert len(timeline.gaps_s) == len(words) - 1
    assert timeline.done
    assert not timeline.broken
    assert timeline.usage is not None
    assert timeline.usage.prompt_tokens == 9
    assert timeline.first_s is not None
    assert timeline.last_s is not None
    assert sum(timeline.gaps_s) == timeline.last_s - timeline.first_s


@given(st.binary(max_size=400), st.integers(1, 50))
def test_no_bytes_make_it_fail(data: bytes, size: int) -> None:
    timeline = AnswerTimeline()
    for start in range(0, len(data), size):
        timeline.feed(data[start : start + size], float(start))
