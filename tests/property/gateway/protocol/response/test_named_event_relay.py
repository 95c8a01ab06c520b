"""Property tests that streams with named events are relayed unchanged, however they are split."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol import api_table
from gateway.protocol.api_table import Api
from gateway.protocol.errors import Failure
from gateway.protocol.response.http_response_parser import encode_chunk
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.named_event_relay import NamedEventRelay
from gateway.protocol.response.relay import DONE, Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.protocol.upstream_error import UpstreamError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def event(name: str, **data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({**data, 'type': name})}\n\n".encode()


MESSAGE = [
    event("message_start", message={"model": "m", "stop_reason": None, "usage": {
        "input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 0}}),
    event("ping"),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "event: error\n"}),
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3}),
    event("message_stop"),
]  # fmt: skip
RESPONSE = [
    event("response.created", response={"model": "m", "status": "in_progress", "usage": None}),
    event("response.in_progress", response={"model": "m", "status": "in_progress"}),
    event("response.output_item.added", item={"status": "in_progress"}),
    event("response.output_text.delta", delta='{"usage": 1}', sequence_number=3),
    event("response.output_item.done", item={"status": "completed"}),
    event("response.completed", response={"model": "m", "status": "completed", "usage": {
        "input_tokens": 12, "input_tokens_details": {"cached_tokens": 7}, "output_tokens": 3}}),
]  # fmt: skip
STREAMS = [(api_table.MESSAGES, MESSAGE), (api_table.RESPONSES, RESPONSE)]
IDS = ["messages", "responses"]


def relay_of(api: Api, served: str = "m", asked: str = "m") -> NamedEventRelay:
    assert api.grammar is not None
    rewriter = ModelNameRewriter(served, asked) if served != asked else None
    return NamedEventRelay(b"", None, False, rewriter, None, api.grammar, api.errors)


def framed(*events: bytes) -> bytes:
    return HEAD + b"".join(map(encode_chunk, events)) + LAST


def fed(relay: Relay, data: bytes, cuts: list[int] | None = None) -> bytes:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts or []), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    return b"".join(relay.feed(piece, 1.0) for piece in pieces if piece)


def body_of(out: bytes) -> bytes:
    rest, payload = out.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        payload, rest = payload + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return payload


@pytest.mark.parametrize(("api", "events"), STREAMS, ids=IDS)
@settings(max_examples=150, deadline=None)
@given(cuts=st.lists(st.integers(0, 4000), max_size=12))
def test_a_whole_stream_passes_unchanged_with_its_counts_however_it_is_cut(
    api: Api, events: list[bytes], cuts: list[int]
) -> None:
    relay = relay_of(api)
    assert body_of(fed(relay, framed(*events), cuts)) == b"".join(events)
    assert relay.state is DONE
    assert relay.usage == TokenUsage(12, 3, 7)
    assert relay.first_token_at == 1.0
    assert not relay.has_error_event
    assert relay.finish_reason == ("end_turn" if api is api_table.MESSAGES else "completed")


@pytest.mark.parametrize(("api", "events"), STREAMS, ids=IDS)
@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 4000), max_size=8))
def test_every_event_names_the_model_that_was_asked_for(
    api: Api, events: list[bytes], cuts: list[int]
) -> None:
    relay = relay_of(api, "m", "asked")
    out = body_of(fed(relay, framed(*events), cuts))
    assert out == b"".join(events).replace(b'"model": "m"', b'"model": "asked"')


@pytest.mark.parametrize(("api", "events"), STREAMS, ids=IDS)
@pytest.mark.parametrize("missing", [1, 2])
def test_a_stream_without_its_last_event_ends_with_an_error_event(
    api: Api, events: list[bytes], missing: int
) -> None:
    relay = relay_of(api)
    out = body_of(fed(relay, framed(*events[:-missing])))
    extra = out.removeprefix(b"".join(events[:-missing]))
    assert relay.has_error_event
    name, data = extra.rstrip(b"\n").split(b"\n")
    assert (name, json.loads(data[6:])["type"]) == (b"event: error", "error")


@pytest.mark.parametrize(("api", "events"), STREAMS, ids=IDS)
def test_a_stream_cut_within_its_last_event_is_broken(api: Api, events: list[bytes]) -> None:
    relay = relay_of(api)
    fed(relay, framed(*events[:-1], events[-1][:-3]))
    assert relay.has_error_event


@pytest.mark.parametrize(("api", "events"), STREAMS, ids=IDS)
def test_nothing_is_shown_before_the_engine_s_first_own_event(
    api: Api, events: list[bytes]
) -> None:
    relay = relay_of(api)
    assert fed(relay, HEAD + encode_chunk(events[0]) + encode_chunk(events[1])) == b""
    assert not relay.is_committed
    assert relay.feed(encode_chunk(events[2]), 2.0)
    assert relay.is_committed
    assert relay.first_token_at is None


@pytest.mark.parametrize(("api", "events"), STREAMS, ids=IDS)
def test_an_error_before_any_token_is_a_refusal_or_a_failure_of_the_engine(
    api: Api, events: list[bytes]
) -> None:
    refused = event("error", error={"type": "BadRequestError", "message": "too long"}, code=400)
    relay = relay_of(api)
    assert fed(relay, framed(events[0], refused)) == b""
    assert (relay.is_refused, relay.status) == (True, 400)
    assert json.loads(relay.refusal_body)["error"]["message"] == "too long"
    failed = event("error", error={"type": "internal_error", "message": "lost"})
    with pytest.raises(UpstreamError, match="error event"):
        fed(relay_of(api), framed(events[0], failed))


@pytest.mark.parametrize(("api", "events"), STREAMS, ids=IDS)
def test_an_engine_s_error_in_mid_answer_passes_and_is_noted(api: Api, events: list[bytes]) -> None:
    failed = event("error", error={"type": "internal_error", "message": "lost"})
    relay = relay_of(api)
    assert body_of(fed(relay, framed(*events[:4], failed))) == b"".join([*events[:4], failed])
    assert relay.has_error_event


@pytest.mark.parametrize(("api", "events"), STREAMS, ids=IDS)
def test_the_gateway_s_own_error_event_has_the_api_s_shape(api: Api, events: list[bytes]) -> None:
    relay = relay_of(api)
    fed(relay, HEAD + b"".join(map(encode_chunk, events[:4])))
    out = relay.end_with_error(Failure.UPSTREAM_FAILED, "gone")
    payload = json.loads(body_of(b"\r\n\r\n" + out).split(b"data: ")[1])
    assert payload["error"]["message"] == "gone"
    if api is api_table.RESPONSES:
        assert (payload["sequence_number"], payload["code"]) == (4, "stream_interrupted")
    else:
        assert payload == {"type": "error", "error": {"type": "api_error", "message": "gone"}}


@pytest.mark.parametrize("api", [api_table.MESSAGES, api_table.RESPONSES], ids=IDS)
def test_a_whole_answer_has_its_counts_and_its_reason(api: Api) -> None:
    if api is api_table.MESSAGES:
        body: dict[str, Any] = {"model": "m", "stop_reason": "tool_use", "usage": {
            "input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 3}}  # fmt: skip
    else:
        body = {"model": "m", "output": [{"status": "completed"}], "status": "incomplete",
                "usage": {"input_tokens": 12, "output_tokens": 3,
                          "input_tokens_details": {"cached_tokens": 7}}}  # fmt: skip
    text = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    for relay in (relay_of(api), relay_of(api, "m", "asked")):
        fed(relay, head % len(text) + text)
        assert relay.usage == TokenUsage(12, 3, 7)
        assert relay.finish_reason == ("tool_use" if api is api_table.MESSAGES else "incomplete")
