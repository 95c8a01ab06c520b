"""Tests of how `penstock bench` measures a stream, such as the time to the first token."""

from __future__ import annotations

import pytest

from planner.bench.answer_timeline import AnswerTimeline


def fed(*events: str) -> AnswerTimeline:
    timeline = AnswerTimeline()
    for second, event in enumerate(events, 1):
        timeline.feed(f"data: {event}\n\n".encode(), float(second))
    return timeline


def test_the_role_alone_is_no_first_token() -> None:
    timeline = fed(
        '{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        '{"choices":[{"delta":{"content":"a"}}]}',
        '{"choices":[{"delta":{"content":"b"}}]}',
        '{"choices":[{"delta":{"content":""},"finish_reason":"stop"}]}',
    )
    assert (timeline.first_s, timeline.last_s, timeline.gaps_s) == (2.0, 3.0, [1.0])


@pytest.mark.parametrize(
    "event",
    [
        '{"choices":[{"text":"completion"}]}',
        '{"choices":[{"delta":{"reasoning_content":"hm"}}]}',
        '{"choices":[{"delta":{"reasoning":"hm"}}]}',
        '{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}',
        '{"choices":[{"delta":{}},{"delta":{"content":"second choice"}}]}',
    ],
)
def test_all_kinds_of_generated_content_count_as_tokens(event: str) -> None:
    assert fed(event).first_s == 1.0


def test_usage_reports_total_and_cached_tokens() -> None:
    counts = '"prompt_tokens":8,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}'
    usage = f'{{"choices":[],"usage":{{{counts}}}}}'
    timeline = fed('{"choices":[{"delta":{"content":"two tokens at once"}}]}', usage)
    assert timeline.tokens == 5
    assert timeline.usage is not None
    assert timeline.usage.cached_tokens == 4


def test_without_usage_every_event_with_content_is_a_token() -> None:
    assert fed(*['{"choices":[{"delta":{"content":"x"}}]}'] * 3).tokens == 3
    assert fed("[DONE]").tokens == 0


def test_an_error_event_is_recorded_by_its_code() -> None:
    assert (
        fed('{"error":{"message":"gone","code":"stream_interrupted"}}').error
        == "stream_interrupted"
    )
    assert (
        fed('{"error":{"message":"gone","type":"server_error","code":null}}').error
        == "server_error"
    )


def test_an_event_that_is_no_json_marks_the_stream_as_broken() -> None:
    assert fed("{oops").broken


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"delta":{"content":"\xff"}}]}',
        b'{"x":' + b"[" * 99_999 + b"]" * 99_999 + b"}",
        b"}",
    ],
)
def test_an_event_that_cannot_be_read_breaks_the_stream_and_nothing_else(data: bytes) -> None:
    timeline = AnswerTimeline()
    timeline.feed(b"data: " + data + b"\n\ndata: [DONE]\n\n", 1.0)
    assert (timeline.broken, timeline.done, timeline.error) == (True, True, None)


def test_an_error_may_be_a_word() -> None:
    timeline = AnswerTimeline()
    timeline.feed(b'data: {"error":"overloaded"}\n\n', 1.0)
    assert (timeline.error, timeline.broken) == ("overloaded", False)


def test_a_line_without_end_is_dropped_and_breaks_the_stream() -> None:
    timeline = AnswerTimeline()
    for _ in range(17):
        timeline.feed(b"x" * (1 << 20), 1.0)
    timeline.feed(b"\n\ndata: [DONE]\n\n", 2.0)
    assert (timeline.broken, timeline.done) == (True, True)
