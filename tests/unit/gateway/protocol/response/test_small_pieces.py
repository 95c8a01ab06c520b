"""Tests that relaying takes time in proportion to the bytes, also in many small pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.batch.answer_receiver import StreamedAnswer
from gateway.forwarding.internal_answer import InternalAnswer
from gateway.protocol.api_table import CHAT
from gateway.protocol.error_formats import OPENAI
from gateway.protocol.response.event_grammar import MESSAGES, RESPONSES
from gateway.protocol.response.http_response_parser import (
    MAX_TRAILER_BYTES,
    ChunkedBody,
    FramingError,
)
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.named_event_relay import NamedEventRelay
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.resume_eligibility import ContinuationTerms
from gateway.protocol.response.short_response import ShortResponse
from gateway.protocol.response.token_ledger import Ledger, LedgerRecorder
from gateway.protocol.translate.chat_types import TranslationError
from gateway.protocol.translate.sse import MAX_EVENT_BYTES, EventReader
from planner.bench.answer_timeline import AnswerTimeline
from tests.cpu_growth import MOST_GROWTH, growth, in_pieces

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PLAIN = b"content-type: application/json\r\ncontent-length: 9000000\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def relay_stream(relay: Relay, first: bytes, event: bytes, piece: int) -> None:
    relay.feed(STREAM, 0.0)
    if first:
        relay.feed(chunk(first), 0.0)
    for data in in_pieces(event, piece):
        relay.feed(chunk(data), 0.0)


def relay_plain(status: bytes, size: int) -> None:
    relay = Relay(b"")
    relay.feed(b"HTTP/1.1 " + status + PLAIN, 0.0)
    for data in in_pieces(b'{"a":"' + b"x" * size, 2):
        relay.feed(data, 0.0)


def relay_head(size: int) -> None:
    relay = Relay(b"")
    for data in in_pieces(b"HTTP/1.1 200 OK\r\nx: " + b"a" * size, 1):
        relay.feed(data, 0.0)


def named(grammar: object, name: bytes, first: bytes, size: int, piece: int) -> None:
    relay = NamedEventRelay(b"", None, False, None, None, grammar, OPENAI)  # type: ignore[arg-type]
    relay_stream(relay, first, b"event: " + name + b'\ndata: {"a":"' + b"x" * size, piece)


def record(event: bytes, piece: int) -> None:
    ledger = Ledger(ContinuationTerms(True, {}, None, 0, False), 10_000_000)
    recorder = LedgerRecorder(ledger, ledger.render_first, "demo", "alias")
    for data in in_pieces(event, piece):
        recorder.feed(data, is_sse=True, is_complete=False)


def record_without_text(size: int) -> None:
    ledger = Ledger(ContinuationTerms(True, {}, None, 0, False), 10_000_000)
    recorder = LedgerRecorder(ledger, ledger.render_first, "demo", "alias")
    chunk = (
        b'{"choices":[{"delta":{"content":""},"token_ids":[%b1]}],"usage":{"completion_tokens":%d}}'
    )
    for number in range(size):
        event = b"data: " + chunk % (b"1," * 99, 100 * number + 100) + b"\n\n"
        recorder.feed(event, is_sse=True, is_complete=False)


def feed_all(feed: Callable[[bytes], object], data: bytes, piece: int) -> None:
    for part in in_pieces(data, piece):
        feed(part)


def rewrite(size: int) -> None:
    rewriter = ModelNameRewriter("demo", "alias")
    for data in in_pieces(b'data: {"a":"' + b"x" * size, 4):
        rewriter.feed(data, is_sse=True, is_complete=False)


def time_line(size: int) -> None:
    line = AnswerTimeline()
    for data in in_pieces(b'data: {"a":"' + b"x" * size, 50):
        line.feed(data, 0.0)


def read_short(size: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nx: " + b"a" * size
    feed_all(ShortResponse(1 << 20).feed, head, 1)


ONE_EVENT = b'data: {"a":"'
WORK: dict[str, tuple[Callable[[int], object], int]] = {
    "an event that is translated": (
        lambda size: feed_all(EventReader().feed, b"data: " + b"x" * size, 50),
        250_000,
    ),
    "a response head": (relay_head, 15_000),
    "a response head of a poll": (read_short, 15_000),
    "a stream's beginning without a token": (
        lambda size: relay_stream(
            Relay(b"", hold_until_token=True), b"", ONE_EVENT + b"x" * size, 8
        ),
        8_000,
    ),
    "the ids of a prompt at a stream's beginning": (
        lambda size: relay_stream(
            Relay(b"", hold_until_token=True),
            b"",
            b'data: {"prompt_token_ids":[' + b"1," * (size // 2),
            50,
        ),
        30_000,
    ),
    "an error event at a stream's beginning": (
        lambda size: relay_stream(
            Relay(b""), b"", b'data: {"error":{"message":"' + b"x" * size, 50
        ),
        100_000,
    ),
    "an event": (
        lambda size: relay_stream(Relay(b""), TOKEN, ONE_EVENT + b"x" * size, 4),
        12_000,
    ),
    "an event of a stream without a token": (
        lambda size: relay_stream(Relay(b""), b'data: {"b":1}\n\n', ONE_EVENT + b"x" * size, 4),
        12_000,
    ),
    "an event whose model is renamed": (rewrite, 12_000),
    "an event that can be continued": (lambda size: record(ONE_EVENT + b"x" * size, 4), 12_000),
    "a list of ids that can be continued": (
        lambda size: record(b'data: {"prompt_token_ids":[' + b"1," * (size // 2), 50),
        250_000,
    ),
    "token ids without text": (record_without_text, 250),
    "the announcement of a named stream": (
        lambda size: named(RESPONSES, b"response.created", b"", size, 50),
        100_000,
    ),
    "a named event": (
        lambda size: named(MESSAGES, b"ping", b"event: content_block_delta\ndata: {}\n\n", size, 4),
        12_000,
    ),
    "an answer that is no stream": (lambda size: relay_plain(b"200 OK\r\n", size), 4_000),
    "a refusal": (lambda size: relay_plain(b"400 Bad Request\r\n", size), 15_000),
    "an event of a batch's answer": (
        lambda size: feed_all(StreamedAnswer(CHAT).feed, ONE_EVENT + b"x" * size, 50),
        250_000,
    ),
    "the text of a batch's answer": (
        lambda size: feed_all(StreamedAnswer(CHAT).feed, TOKEN * size, len(TOKEN)),
        5_000,
    ),
    "an answer to the gateway": (
        lambda size: feed_all(InternalAnswer().write, b"x" * size, 10),
        500_000,
    ),
    "an event of a benchmark's answer": (time_line, 250_000),
}


@pytest.mark.parametrize("name", WORK)
def test_bytes_in_small_pieces_take_linear_time(name: str) -> None:
    assert growth(*WORK[name]) < MOST_GROWTH


def test_a_trailer_without_an_end_is_refused_before_reads_of_it_take_long() -> None:
    body = ChunkedBody()
    with pytest.raises(FramingError, match="trailers"):
        feed_all(body.feed, b"0\r\nx: " + b"a" * 2 * MAX_TRAILER_BYTES, 1)
    assert len(body.partial) <= MAX_TRAILER_BYTES


def test_an_event_of_many_empty_lines_counts_against_the_limit_of_an_event() -> None:
    reader = EventReader()
    with pytest.raises(TranslationError, match="longer than"):
        feed_all(reader.feed, b"data:\n" * (MAX_EVENT_BYTES + 1), 60_000)
