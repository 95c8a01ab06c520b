"""Tests that whole JSON answers reach the client complete, or not at all."""

from __future__ import annotations

import json

import pytest

from gateway.protocol.response.held_answer import MAX_HELD_ANSWER
from gateway.protocol.response.http_response_parser import LAST_CHUNK, encode_chunk
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.relay_state import DONE, HELD
from gateway.protocol.upstream_error import UpstreamError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "model": "m",
        "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
).encode()
READS = [1, 7, 60, 10_000]


def sized(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def chunked(body: bytes) -> bytes:
    pieces = [encode_chunk(body[at : at + 30]) for at in range(0, len(body), 30)]
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"".join(pieces) + LAST_CHUNK


def closed(body: bytes) -> bytes:
    return HEAD + b"connection: close\r\n\r\n" + body


def relayed(relay: Relay, response: bytes, size: int, *, ends: bool = False) -> bytes:
    out = b"".join(
        relay.feed(response[at : at + size], 1.0) for at in range(0, len(response), size)
    )
    return out + (relay.eof() if ends else b"")


@pytest.mark.parametrize("size", READS)
@pytest.mark.parametrize("wire", [sized, chunked, closed])
@pytest.mark.parametrize("cut", [1, 2, 20, len(ANSWER) - 1])
def test_an_answer_cut_off_inside_its_json_is_a_failure_before_the_client_gets_a_byte(
    wire: object, size: int, cut: int
) -> None:
    relay = Relay(b"")
    with pytest.raises(UpstreamError) as failed:
        relayed(relay, wire(ANSWER[:-cut]), size, ends=wire is closed)  # type: ignore[operator]
    assert failed.value.kind == "malformed"
    assert (relay.is_committed, relay.bytes_sent) == (False, 0)


def test_a_cut_answer_is_found_when_its_model_is_renamed_as_well() -> None:
    relay = Relay(b"", rewriter=ModelNameRewriter("m", "other"))
    with pytest.raises(UpstreamError, match="not valid JSON"):
        relay.feed(sized(ANSWER[:-1]), 1.0)


@pytest.mark.parametrize("size", READS)
@pytest.mark.parametrize("wire", [sized, chunked, closed])
def test_a_complete_answer_passes_with_its_counts(wire: object, size: int) -> None:
    relay = Relay(b"")
    out = relayed(relay, wire(ANSWER), size, ends=wire is closed)  # type: ignore[operator]
    assert relay.state is DONE
    assert out.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
    assert out.count(b"finish_reason") == 1
    assert (relay.usage.prompt_tokens, relay.usage.completion_tokens) == (3, 2)
    assert relay.finish_reason == "stop"


@pytest.mark.parametrize(
    "body",
    [
        b'{"logprob": NaN, "other": -Infinity}',
        b'{"text": "\\ud800 alone"}',
        b'{"text": "\xff"}',
        b'{"text": "a\ttab"}',
        b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'[{"data": 1}]\n',
        b'"a word"',
    ],
)
def test_json_that_python_reads_passes(body: bytes) -> None:
    assert body in Relay(b"").feed(sized(body), 1.0)


def test_an_answer_of_another_type_is_not_read_as_json() -> None:
    text = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\n{hi!"
    assert Relay(b"").feed(text, 1.0).endswith(b"{hi!")


def test_the_first_part_of_an_answer_is_held_back() -> None:
    relay = Relay(b"")
    assert relay.feed(sized(ANSWER)[:-1], 1.0) == b""
    assert relay.state is HELD
    assert relay.has_held_payload


def test_an_answer_too_long_to_be_held_back_breaks_off_if_it_ends_within_its_json() -> None:
    long = b'{"data":"%b"}' % (b"x" * 2 * MAX_HELD_ANSWER)
    relay = Relay(b"")
    assert len(relayed(relay, sized(long), 65_536)) > len(long)
    relay, broken = Relay(b""), sized(long[:-1])
    with pytest.raises(UpstreamError, match="not valid JSON"):
        relayed(relay, broken, 65_536)
    assert relay.is_committed


def test_blanks_that_keep_a_connection_alive_pass_at_once() -> None:
    relay = Relay(b"")
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    assert relay.feed(head + encode_chunk(b"\n"), 1.0).endswith(encode_chunk(b"\n"))
    out = relay.feed(encode_chunk(ANSWER) + LAST_CHUNK, 2.0)
    assert ANSWER in out
