"""Builds engine responses, feeds them to a relay in pieces, and parses what the relay returns."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

from hypothesis import strategies as st

from gateway.protocol.errors import Failure
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.protocol.response.relay_state import RelayState
from gateway.protocol.response.usage_and_error_search import (
    TokenUsage,
)

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
OWN_HEADERS = b"x-request-id: req_1\r\n"
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Result:
    out: bytes
    state: RelayState
    usage: TokenUsage
    finish_reason: str | None
    events: int
    first_token: bool
    first_tokens: int
    failed: bool
    reusable: bool
    failure_kind: str | None


def feed(
    data: bytes,
    cuts: list[int],
    *,
    eof: bool = False,
    http_1_0: bool = False,
    alias: str | None = None,
    choices: int = 1,
) -> Result:
    first_tokens: list[None] = []
    renamer = ModelNameRewriter("served", alias) if alias else None
    relay = Relay(
        OWN_HEADERS, lambda: first_tokens.append(None), http_1_0, renamer, choice_count=choices
    )
    out, failure_kind = b"", None
    edges = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    try:
        for now, (start, stop) in enumerate(itertools.pairwise(edges)):
            if start < stop and relay.state is not RelayState.DONE:
                out += relay.feed(data[start:stop], float(now))
            while relay.state is RelayState.BEHIND:
                out += relay.feed(b"", float(now))
        if eof and relay.state is not RelayState.DONE:
            out += relay.eof()
    except UpstreamError as error:
        failure_kind = error.kind
        if relay.is_committed:
            out += relay.end_with_error(Failure.UPSTREAM_FAILED, "gone")
    return Result(
        out,
        relay.state,
        relay.usage,
        relay.finish_reason,
        relay.event_count,
        relay.first_token_at is not None,
        len(first_tokens),
        relay.has_error_event,
        relay.is_connection_reusable,
        failure_kind,
    )


def delta(text: str, **more: object) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None} | more
    return (
        "data: "
        + json.dumps({"id": "c1", "model": "served", "choices": [choice]}, separators=(",", ":"))
        + "\n\n"
    )


USAGE = (
    'data: {"id":"c1","model":"served","choices":[],"usage":{"prompt_tokens":17,"total_tokens":19,'
    '"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
)
ROLE = (
    'data: {"id":"c1","model":"served",'
    '"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
)
TEXTS = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 2500), max_size=60)


def whole_stream(texts: list[str]) -> str:
    return (
        ROLE
        + "".join(delta(text) for text in texts)
        + delta("", finish_reason="stop")
        + USAGE
        + DONE
    )


def chunked(
    payload: bytes, sizes: list[int], trailers: bytes = b"", extension: bytes = b""
) -> bytes:
    wire, offset = b"", 0
    for size in [*sizes, len(payload)]:
        piece = payload[offset : offset + size]
        if piece:
            wire += b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)
        offset += len(piece)
    return wire + b"0\r\n" + trailers + b"\r\n"


def read(out: bytes, *, strict: bool = True) -> tuple[bytes, bytes, bool]:
    # Parse a response as a strict HTTP client does.
    #
    # Returns head, payload, and whether the body is complete.
    head, _, rest = out.partition(b"\r\n\r\n")
    payload = b""
    while rest:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        if not size:
            while not rest.startswith(b"\r\n"):  # trailers
                line, _, rest = rest.partition(b"\r\n")
                assert b":" in line
            assert rest == b"\r\n"
            return head, payload, True
        payload += rest[:size]
        if strict:
            assert rest[size : size + 2] in (b"\r\n", b"\r", b"")
        rest = rest[size + 2 :]
    return head, payload, False


PLAIN = json.dumps(
    {
        "model": "served",
        "choices": [
            {"message": {"content": 'a "model":"served" within'}, "finish_reason": "length"}
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": None},
    },
    separators=(",", ":"),
).encode()
