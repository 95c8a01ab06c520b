"""Property tests of streams with long events, which are read equally in pieces of any size."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.error_formats import OPENAI
from gateway.protocol.response.event_grammar import MESSAGES
from gateway.protocol.response.named_event_relay import NamedEventRelay
from gateway.protocol.response.payload_scan import MAX_PARTIAL_EVENT, MAX_RESCAN
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.retryable_start import HeldChunks, HeldNamedEvents, RetryableStart
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.protocol.upstream_error import UpstreamError
from tests.property.gateway.protocol.response.relay_feed import HEAD, ROLE, delta

PADDING = st.sampled_from([0, 10, MAX_RESCAN - 100, MAX_RESCAN, 2 * MAX_RESCAN, 5000])
PIECES = st.lists(
    st.integers(1, 40) | st.integers(1, 700) | st.integers(1, 9000), min_size=1, max_size=12
)
MOST_PIECES, WHOLE = 300, [10**9]
USAGE = {"prompt_tokens": 17, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}


def event(ends: str, **members: object) -> str:
    return "data: " + json.dumps(members, separators=(",", ":")) + ends


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    ends = draw(st.sampled_from(["\n\n", "\r\n\r\n"]))
    padding = draw(st.lists(PADDING, min_size=1, max_size=3))
    events = [ROLE, *(delta("text", logprobs="x" * size) for size in padding)]
    last = {"index": 0, "delta": {}, "finish_reason": "stop", "a": "y" * draw(PADDING)}
    order = [("choices", [last]), ("usage", USAGE), ("more", "z" * draw(PADDING))]
    events.append(event(ends, **dict(draw(st.permutations(order)))))
    if draw(st.booleans()):
        events.append(event(ends, error={"message": "w" * draw(PADDING)}))
    elif draw(st.booleans()):
        events.append("data: [DONE]" + ends)
    payload = "".join(events).encode()
    return payload[: len(payload) - draw(st.sampled_from([0, 1, 3, 200]))]


def in_sizes(data: bytes, sizes: list[int]) -> list[bytes]:
    edges, least = [0], len(data) // MOST_PIECES
    for size in itertools.cycle(sizes):
        if edges[-1] >= len(data):
            break
        edges.append(min(len(data), edges[-1] + max(size, least)))
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def relayed(relay: Relay, payload: bytes, sizes: list[int]) -> tuple[object, ...]:
    # Relay a stream whose payload is one HTTP chunk, which arrives in pieces of these sizes.
    out = relay.feed(HEAD, 0.0)
    for piece in in_sizes(b"%x\r\n%b\r\n" % (len(payload), payload), sizes):
        out += relay.feed(piece, 1.0)
    found = (relay.event_count, relay.first_token_at is None, relay.has_error_event)
    out += relay.feed(b"0\r\n\r\n", 2.0)
    return found, relay.usage, relay.finish_reason, relay.has_error_event, payload_of(out)


def payload_of(out: bytes) -> bytes:
    payload, rest = b"", out.partition(b"\r\n\r\n")[2]
    while rest:
        line, _, rest = rest.partition(b"\r\n")
        payload, rest = payload + rest[: int(line, 16)], rest[int(line, 16) + 2 :]
    return payload


@given(streams(), PIECES)
def test_a_stream_with_long_events_is_read_the_same_in_any_pieces(
    payload: bytes, sizes: list[int]
) -> None:
    assert relayed(Relay(b""), payload, sizes) == relayed(Relay(b""), payload, WHOLE)


@given(st.permutations(["choices", "usage", "huge"]), PIECES)
def test_counts_are_found_anywhere_in_a_huge_event(order: list[str], sizes: list[int]) -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
    members = {"choices": [choice], "usage": USAGE, "huge": "z" * 3 * MAX_PARTIAL_EVENT}
    payload = event("\n\n", **{name: members[name] for name in order}) + "data: [DONE]\n\n"
    relay = Relay(b"")
    found, usage, reason, has_failed, out = relayed(relay, payload.encode(), sizes)
    assert (found, reason, has_failed) == ((2, False, False), "stop", False)
    assert usage == TokenUsage(17, 2, 9)
    assert out == payload.encode()


NAMED = (
    'event: message_start\ndata: {"message":{"usage":{"input_tokens":31},"a":"%s"}}\n\n'
    'event: content_block_delta\ndata: {"a":"%s","delta":{"text":"x"}}\n\n'
    'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"},"a":"%s",'
    '"usage":{"output_tokens":5}}\n\nevent: message_stop\ndata: {}\n\n'
)


@given(PADDING, PADDING, PADDING, st.sampled_from([0, 2, 60]), PIECES)
def test_a_named_stream_with_long_events_is_read_the_same_in_any_pieces(
    first: int, second: int, third: int, short: int, sizes: list[int]
) -> None:
    payload = (NAMED % ("x" * first, "y" * second, "z" * third)).encode()
    payload = payload[: len(payload) - short]

    def relay() -> NamedEventRelay:
        return NamedEventRelay(b"", None, False, None, None, MESSAGES, OPENAI)

    assert relayed(relay(), payload, sizes) == relayed(relay(), payload, WHOLE)


BEGINNINGS = st.lists(
    st.sampled_from(
        [
            *(
                'data: {"error"',
                ": ping\n\n",
                "data: {}\n\n",
                "\n",
                "\r\n\r\n",
                " " * 70,
                "x" * 300,
            ),
            *(
                '"content":"',
                'a"',
                '"token_ids":[',
                "1,",
                "0\r\n\r\n",
                "[DONE]",
                '"finish_reason":',
            ),
            *('"stop"', '"prompt_token_ids":[', "event: ping\n", "event: error\n", "event: a\r\n"),
        ]
    ),
    max_size=25,
)


def decision(held: RetryableStart, pieces: list[bytes]) -> tuple[int, bool | str]:
    # Return how many bytes decided about a beginning, and the decision.
    for piece in pieces:
        try:
            if not held.is_undecided(piece):
                return len(held.data), False
        except UpstreamError as error:
            return len(held.data), error.kind
    return len(held.data), True


@given(BEGINNINGS, PIECES, st.sampled_from(["first event", "first token", "named"]))
def test_a_beginning_is_decided_by_the_same_bytes_however_it_is_cut(
    parts: list[str], sizes: list[int], kind: str
) -> None:
    new: Callable[[], RetryableStart] = {
        "first event": lambda: HeldChunks(False),
        "first token": lambda: HeldChunks(True),
        "named": lambda: HeldNamedEvents(MESSAGES),
    }[kind]
    pieces = in_sizes("".join(parts).encode(), sizes)
    length, decided = decision(new(), pieces)
    for number in range(1, len(pieces) + 1):
        whole = b"".join(pieces[:number])
        if len(whole) > length:
            break
        assert decision(new(), [whole])[1] == (True if len(whole) < length else decided)
