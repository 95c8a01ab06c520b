"""Tests that long work on a response is done in small steps, with little memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from gateway.protocol.errors import Failure
from gateway.protocol.response import long_event
from gateway.protocol.response.http_response_parser import LAST_CHUNK, ChunkedBody, encode_chunk
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.relay_state import BEHIND, DONE
from gateway.protocol.response.resumable_relay import RecordedRelay
from gateway.protocol.response.resume_eligibility import ContinuationTerms
from gateway.protocol.response.stepwise_output import STEP_BYTES
from gateway.protocol.response.token_ledger import Ledger, LedgerRecorder
from gateway.protocol.translate import translation_table
from gateway.protocol.translate.translator import AnswerTranslator
from tests.unit.gateway.protocol.translate.chats import (
    Piece,
    answer,
    message_of,
    response_of,
    stream,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
SSE, JSON = b"text/event-stream", b"application/json"
REQUEST = b'{"model":"m","input":"hi"}'
LONG = 'a "quoted" é\n' * 30_000
MOST_OUTPUT = 3 * STEP_BYTES  # a step may exceed STEP_BYTES by one piece
NEW_TRANSLATORS: dict[str, Callable[[], AnswerTranslator]] = {
    "messages": translation_table._messages(REQUEST, "m", 9),
    "responses": translation_table._responses(REQUEST, "m", 9),
}
ANSWERS: dict[str, tuple[list[Piece], int]] = {
    "a text in one event": ([("text", LONG)], len(LONG)),
    "a text in many events": ([("text", LONG)], 300),
    "a thought in one event": ([("thought", LONG)], len(LONG)),
    "arguments in one event": ([("call", ("run", json.dumps({"a": LONG})))], 2 * len(LONG)),
}


def steps(relay: Relay) -> Iterator[bytes]:
    while relay.state is BEHIND:
        yield relay.feed(b"", 1.0)


def relayed(relay: Relay, kind: bytes, payload: bytes) -> list[bytes]:
    # Relay a response that arrives in reads of 16 KiB; return the output of each call of feed().
    out = [relay.feed(HEAD % kind, 0.0)]
    for start in range(0, len(payload), 16_384):
        out.append(relay.feed(encode_chunk(payload[start : start + 16_384]), 1.0))
        out += steps(relay)
    out.append(relay.feed(LAST_CHUNK, 2.0))
    return [*out, *steps(relay)]


def payload_of(out: list[bytes]) -> bytes:
    body = ChunkedBody()
    payload = body.feed(b"".join(out).partition(b"\r\n\r\n")[2])
    assert body.is_complete
    return payload


@pytest.mark.parametrize("client", NEW_TRANSLATORS)
@pytest.mark.parametrize("name", ANSWERS)
def test_a_long_stream_is_translated_in_steps_of_little_output(client: str, name: str) -> None:
    pieces, size = ANSWERS[name]
    relay = Relay(b"", translator=NEW_TRANSLATORS[client]())
    out = relayed(relay, SSE, stream(pieces, size=size))
    assert max(map(len, out)) <= MOST_OUTPUT
    assert relay.state is DONE
    assert relay.bytes_sent == sum(map(len, out))
    translated = payload_of(out)
    read = message_of if client == "messages" else response_of
    whole = NEW_TRANSLATORS[client]()._translate_whole(bytearray(answer(pieces)))
    assert read(translated) == json.loads(b"".join(whole))


@pytest.mark.parametrize("client", NEW_TRANSLATORS)
def test_a_long_whole_answer_is_translated_in_steps_of_little_output(client: str) -> None:
    relay = Relay(b"", translator=NEW_TRANSLATORS[client]())
    out = relayed(relay, JSON, answer([("thought", LONG), ("text", LONG)]))
    assert max(map(len, out)) <= MOST_OUTPUT
    assert json.dumps(json.loads(payload_of(out))).count(json.dumps(LONG)) == 2
    assert relay.state is DONE


@pytest.mark.parametrize("client", NEW_TRANSLATORS)
def test_a_long_event_is_translated_with_few_copies(client: str) -> None:
    # The copies are the event itself, its decoded text, and the output of a few steps.
    text = "x" * 900_000
    relay = Relay(b"", translator=NEW_TRANSLATORS[client]())
    data = stream([("text", text)], size=len(text))
    relay.feed(HEAD % SSE, 0.0)
    reads = [encode_chunk(data[start : start + 16_384]) for start in range(0, len(data), 16_384)]
    tracemalloc.start()
    try:
        for read in reads:
            relay.feed(read, 1.0)
            for _ in steps(relay):
                pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(text)


@pytest.mark.parametrize("client", NEW_TRANSLATORS)
def test_bytes_that_arrive_before_the_steps_are_done_change_nothing(client: str) -> None:
    data = stream([("text", LONG)], size=len(LONG))
    head, half = HEAD % SSE, len(data) // 2
    relay = Relay(b"", translator=NEW_TRANSLATORS[client]())
    out = [relay.feed(head, 0.0), relay.feed(encode_chunk(data[:half]), 1.0)]
    out.append(relay.feed(encode_chunk(data[half:]), 1.0))
    assert relay.state is BEHIND
    out.append(relay.feed(LAST_CHUNK, 2.0))
    out += steps(relay)
    other = Relay(b"", translator=NEW_TRANSLATORS[client]())
    assert payload_of(out) == payload_of(relayed(other, SSE, data))


@pytest.mark.parametrize("client", NEW_TRANSLATORS)
def test_a_stream_that_fails_between_steps_ends_after_all_its_output(client: str) -> None:
    data = stream([("text", LONG)], size=len(LONG))
    whole = data[: data.index(b"data: {", data.index(b"quoted"))]
    relay = Relay(b"", translator=NEW_TRANSLATORS[client]())
    out = [relay.feed(HEAD % SSE, 0.0), relay.feed(encode_chunk(whole[:300]), 1.0)]
    out.append(relay.feed(encode_chunk(whole[300:]), 1.0))
    assert relay.state is BEHIND
    out.append(relay.end_with_error(Failure.UPSTREAM_FAILED, "gone"))
    text = payload_of(out).decode()
    pieces = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    deltas = [piece["delta"] for piece in pieces if "delta" in piece]
    assert "".join(d if isinstance(d, str) else d["text"] for d in deltas) == LONG
    assert "gone" in text[-2000:]


def test_the_end_of_a_connection_does_not_cut_off_a_translation() -> None:
    relay = Relay(b"", translator=NEW_TRANSLATORS["responses"]())
    out = relay.feed(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", 0.0)
    out += relay.feed(answer([("text", LONG)]), 1.0)
    out += relay.eof()
    assert relay.state is DONE
    assert json.loads(payload_of([out]))["output"][0]["content"][0]["text"] == LONG


def test_the_ids_of_a_long_prompt_are_decoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = long_event._decode_ids

    def count(text: bytes) -> list[int]:
        decoded[-1] += len(text)
        return decode(text)

    monkeypatch.setattr(long_event, "_decode_ids", count)
    ledger = Ledger(ContinuationTerms(True, {}, None, 0, False), 1_000_000)
    recorder = LedgerRecorder(ledger, ledger.render_first, "m", "m")
    relay = RecordedRelay(b"", rewriter=recorder, hold_until_token=True)
    relay.feed(HEAD % SSE, 0.0)
    ids = list(range(100_000, 200_000))
    text = b'data: {"prompt_token_ids":[%b],' % b",".join(b"%d" % number for number in ids)
    text += b'"choices":[{"delta":{"content":"a"},"token_ids":[7]}],'
    text += b'"usage":{"completion_tokens":1}}\n\n'
    out = []
    for start in range(0, len(text), STEP_BYTES):
        decoded.append(0)
        out.append(relay.feed(encode_chunk(text[start : start + STEP_BYTES]), 1.0))
    assert relay.is_committed
    while relay.state is BEHIND:
        decoded.append(0)
        out.append(relay.feed(b"", 1.0))
    assert list(ledger.prompt_ids) == ids
    assert sum(decoded) > 7 * len(ids) - 10
    assert max(decoded) <= 3 * STEP_BYTES  # the first two steps of a long event are decoded at once
    assert b'"content":"a"' in b"".join(out)


def test_bytes_behind_an_answer_whose_beginning_was_held_are_surplus() -> None:
    relay = Relay(b"", hold_until_token=True)
    relay.feed(HEAD % SSE, 0.0)
    text = b'data: {"a":"' + b"x" * 40_000 + b'","choices":[{"delta":{"content":"a"}}]}\n\n'
    answer_bytes = encode_chunk(text) + encode_chunk(b"data: [DONE]\n\n") + LAST_CHUNK
    out = relay.feed(answer_bytes + b"surplus" * 10_000, 1.0) + b"".join(steps(relay))
    assert relay.state is DONE
    assert not relay.is_connection_reusable
    assert out.endswith(answer_bytes)
