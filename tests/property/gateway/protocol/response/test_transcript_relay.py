"""Property tests that transcriptions are relayed unchanged, whichever events their stream has."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.errors import Failure
from gateway.protocol.response.http_response_parser import encode_chunk
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.relay import DONE
from gateway.protocol.response.transcript_relay import TranscriptRelay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.protocol.upstream_error import UpstreamError
from tests.property.gateway.protocol.response.relay_feed import HEAD, read

LAST = b"0\r\n\r\n"
USAGE = {"type": "tokens", "input_tokens": 14, "output_tokens": 2, "total_tokens": 16}


def event(blank: str = " ", **data: Any) -> bytes:
    return f"data: {json.dumps(data, separators=(',', f':{blank}'))}\n\n".encode()


def transcript(text: str, blank: str = " ") -> list[bytes]:
    return [
        event(blank, type="transcript.text.delta", delta="hello "),
        event(blank, type="transcript.text.delta", delta="world"),
        event(blank, type="transcript.text.done", text=text, usage=USAGE),
    ]


CHUNKS = [
    event(model="m", choices=[{"index": 0, "delta": {"content": "hello"}, "finish_reason": None}]),
    event(model="m", choices=[{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]),
]
MARKER = b"data: [DONE]\n\n"


def relay_of(asked: str = "m") -> TranscriptRelay:
    rewriter = None if asked == "m" else ModelNameRewriter("m", asked)
    return TranscriptRelay(b"", None, False, rewriter, None)


def fed(relay: TranscriptRelay, events: list[bytes], cuts: list[int] | None = None) -> bytes:
    data = HEAD + b"".join(map(encode_chunk, events)) + LAST
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts or []), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    return b"".join(relay.feed(piece, 1.0) for piece in pieces if piece)


@settings(max_examples=150, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 4000), max_size=12),
    asked=st.sampled_from(["m", "alias"]),
    text=st.sampled_from(["hello world", "x" * 3000]),
    blank=st.sampled_from(["", " "]),
    marker=st.sampled_from([[], [MARKER]]),
)
def test_a_stream_that_ends_with_its_whole_transcript_passes_unchanged(
    cuts: list[int], asked: str, text: str, blank: str, marker: list[bytes]
) -> None:
    relay, events = relay_of(asked), transcript(text, blank) + marker
    _, payload, is_whole = read(fed(relay, events, cuts))
    assert (payload, is_whole) == (b"".join(events), True)
    assert relay.state is DONE
    assert relay.usage == TokenUsage(14, 2, None)
    assert relay.first_token_at == 1.0
    assert not relay.has_error_event


def test_a_transcript_of_any_length_is_a_proper_end() -> None:
    events, size = transcript("x" * 300_000), 50_000
    relay, data = relay_of(), HEAD + b"".join(map(encode_chunk, events)) + LAST
    out = b"".join(relay.feed(data[at : at + size], 1.0) for at in range(0, len(data), size))
    assert read(out)[1] == b"".join(events)
    assert not relay.has_error_event


@pytest.mark.parametrize("events", [transcript("hi")[:2], transcript("hi")[:1]])
def test_a_stream_without_its_whole_transcript_ends_with_an_error_event(
    events: list[bytes],
) -> None:
    relay = relay_of()
    payload = read(fed(relay, events))[1]
    assert payload.startswith(b"".join(events))
    assert b'"code":"stream_interrupted"' in payload
    assert relay.has_error_event


@pytest.mark.parametrize("asked", ["m", "alias"])
@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_stream_cut_within_its_last_event_is_no_proper_end(asked: str, cut: int) -> None:
    *first, last = transcript("hello world")
    relay = relay_of(asked)
    payload = read(fed(relay, [*first, last[:-cut]]))[1]
    assert b'"code":"stream_interrupted"' in payload
    assert relay.has_error_event


def test_an_engine_that_dies_within_its_last_event_leaves_the_answer_open() -> None:
    *first, last = transcript("hello world")
    relay = relay_of("alias")
    out = relay.feed(HEAD + b"".join(map(encode_chunk, [*first, last[:-9]])), 1.0)
    with pytest.raises(UpstreamError):
        relay.eof()
    out += relay.end_with_error(Failure.UPSTREAM_FAILED, "gone")
    _, payload, is_whole = read(out)
    assert b"stream_interrupted" in payload or not is_whole


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 1000), max_size=8), asked=st.sampled_from(["m", "alias"]))
def test_chunks_of_a_chat_are_relayed_as_those_of_a_chat(cuts: list[int], asked: str) -> None:
    expected = b"".join([*CHUNKS, MARKER]).replace(
        b'"model": "m"', b'"model": "%b"' % asked.encode()
    )
    for events in (CHUNKS, [*CHUNKS, MARKER]):  # a missing [DONE] is added
        relay = relay_of(asked)
        assert read(fed(relay, events, cuts))[1] == expected
        assert relay.finish_reason == "stop"
        assert not relay.has_error_event


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (USAGE, TokenUsage(14, 2, None)),
        ({"prompt_tokens": 9, "completion_tokens": 3}, TokenUsage(9, 3, None)),
        ({"type": "duration", "seconds": 4}, TokenUsage()),
    ],
)
def test_the_counts_of_a_whole_answer_are_read(usage: dict[str, Any], counts: TokenUsage) -> None:
    body = json.dumps({"text": "hello", "usage": usage}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    relay = relay_of()
    assert relay.feed(head % len(body) + body, 1.0).endswith(body)
    assert relay.usage == counts


def test_subtitles_pass_as_they_are() -> None:
    body = b"1\n00:00:00,000 --> 00:00:01,000\nhello\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
    relay = relay_of("alias")
    assert read(relay.feed(head % len(body) + body, 1.0))[1] == body
