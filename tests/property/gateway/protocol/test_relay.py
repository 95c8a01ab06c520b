"""The response relay, fed with responses split anywhere: the splits must not affect the result.

The result is the client's bytes and the accounting of tokens.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol.errors import Failure
from gateway.protocol.relay import MAX_ERROR_BYTES, Relay, RelayState, UpstreamError
from gateway.protocol.rewrite import ModelNameRewriter
from gateway.protocol.stream_scan import (
    MAX_FIRST_EVENT,
    MAX_REFUSAL_BYTES,
    TokenUsage,
    last_event_end,
)

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
OWN_HEADERS = b"x-request-id: req_1\r\n"
DONE = "data: [DONE]\n\n"
ERROR = "data: " + json.dumps({"error": {"message": "engine died", "code": 500}}) + "\n\n"


@dataclass(frozen=True)
class Result:
    """The outcome of feeding one response to a relay."""

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
    """Return the payload of a complete stream with these texts."""
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
    """Encode a payload in HTTP chunks of these sizes, and one chunk for the rest."""
    wire, offset = b"", 0
    for size in [*sizes, len(payload)]:
        piece = payload[offset : offset + size]
        if piece:
            wire += b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)
        offset += len(piece)
    return wire + b"0\r\n" + trailers + b"\r\n"


def read(out: bytes, *, strict: bool = True) -> tuple[bytes, bytes, bool]:
    """Parse a response as a strict HTTP client does.

    Returns head, payload, and whether the body is complete.
    """
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


@given(
    TEXTS,
    st.lists(st.integers(1, 200), max_size=30),
    CUTS,
    st.sampled_from([b"", b"x-sum: 1\r\n"]),
    st.booleans(),
)
def test_a_stream_is_relayed_the_same_however_it_is_cut(
    texts: list[str], sizes: list[int], cuts: list[int], trailers: bytes, extended: bool
) -> None:
    payload = whole_stream(texts).encode()
    wire = HEAD + chunked(payload, sizes, trailers, b";a=b" if extended else b"")
    relay = feed(wire, cuts)
    head, read_payload, whole = read(relay.out)
    assert (read_payload, whole) == (payload, True)
    assert OWN_HEADERS.strip() in head
    assert head.count(b"content-type: text/event-stream; charset=utf-8") == 1
    assert relay == feed(wire, [])
    assert relay.state is RelayState.DONE
    assert relay.usage == TokenUsage(17, 2, 16)
    assert relay.finish_reason == "stop"
    assert relay.events == len(texts) + 4
    assert relay.first_token
    assert relay.first_tokens == 1
    assert not relay.failed
    assert relay.reusable


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30))
def test_a_stream_may_arrive_byte_by_byte(texts: list[str], sizes: list[int]) -> None:
    wire = HEAD + chunked(whole_stream(texts).encode(), sizes)
    assert feed(wire, list(range(len(wire)))) == feed(wire, [])


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30), CUTS, st.booleans(), st.integers(0, 40))
def test_an_incomplete_stream_without_done_ends_with_an_error_event(
    texts: list[str], sizes: list[int], cuts: list[int], trailers: bool, short: int
) -> None:
    """The body is framed properly, but its last event is missing or incomplete."""
    payload = (ROLE + "".join(delta(text) for text in texts)).encode()
    payload = payload[: len(payload) - short]
    wire = HEAD + chunked(payload, sizes, b"a: b\r\n" if trailers else b"")
    relay = feed(wire, cuts)
    _, body_read, whole = read(relay.out)
    assert whole
    assert body_read.startswith(payload)
    *_, last, rest = body_read.split(b"\n\n")
    assert rest == b""
    assert json.loads(last.strip().removeprefix(b"data: "))["error"]["code"] == "stream_interrupted"
    assert b"[DONE]" not in body_read
    assert relay.failed
    assert relay == feed(wire, [])


@st.composite
def choices_in_any_order(draw: st.DrawFn) -> tuple[list[str], int]:
    """Draw the interleaved events of several choices, and the number of choices."""
    choices = draw(st.integers(1, 4))
    left = [
        draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3))
        for _ in range(choices)
    ]
    spaced, events = draw(st.booleans()), [ROLE]
    while any(left):
        index = draw(st.sampled_from([index for index in range(choices) if left[index]]))
        text = left[index].pop()
        reason = None if left[index] else draw(st.sampled_from(["stop", "length", "tool_calls"]))
        choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
        chunk = json.dumps(
            {"model": "served", "choices": [choice]}, separators=None if spaced else (",", ":")
        )
        events.append(f"data: {chunk}\n\n")
    if spaced:
        events[0] = "data: " + json.dumps(json.loads(ROLE[6:])) + "\n\n"
    return [*events, USAGE] if draw(st.booleans()) else events, choices


@given(
    choices_in_any_order(),
    st.lists(st.integers(1, 200), max_size=30),
    CUTS,
    st.sampled_from([None, "my-alias"]),
    st.booleans(),
)
@example(
    (
        [
            'data: {"id": "c1", "choices": []}\n\n',
            'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n',
        ],
        1,
    ),
    [12],  # the first chunk ends between a member's name and its value
    [],
    None,
    False,
)
def test_a_finished_stream_without_done_gets_its_done(
    told: tuple[list[str], int],
    sizes: list[int],
    cuts: list[int],
    alias: str | None,
    http_1_0: bool,
) -> None:
    events, choices = told
    payload = "".join(events).encode()
    relay = feed(
        HEAD + chunked(payload, sizes), cuts, alias=alias, http_1_0=http_1_0, choices=choices
    )
    body_read = relay.out.partition(b"\r\n\r\n")[2] if http_1_0 else read(relay.out)[1]
    if alias is not None:
        payload = re.sub(rb'("model": ?)"served"', rb'\1"my-alias"', payload)
    assert body_read == payload + DONE.encode()
    assert (relay.state, relay.failed, relay.failure_kind, relay.reusable) == (
        RelayState.DONE,
        False,
        None,
        True,
    )


@given(choices_in_any_order(), st.lists(st.integers(1, 200), max_size=30), CUTS, st.data())
def test_a_stream_with_an_unfinished_choice_and_no_done_is_broken(
    told: tuple[list[str], int], sizes: list[int], cuts: list[int], data: st.DataObject
) -> None:
    events, choices = told
    finishing = [event for event in events if '"finish_reason"' in event and "null" not in event]
    lost = data.draw(st.sampled_from([*finishing, None]))
    retained = [event for event in events if event != lost]
    payload = "".join(retained).encode()[: None if lost else -1]
    relay = feed(
        HEAD + chunked(payload, sizes),
        cuts,
        choices=choices + (lost is None and payload.endswith(b"}\n")),
    )
    body_read = read(relay.out)[1]
    assert b"[DONE]" not in body_read
    assert b'"stream_interrupted"' in body_read
    assert relay.failed


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_stream_without_done_is_broken(reason: str) -> None:
    payload = (ROLE + delta("a") + delta("", finish_reason=reason)).encode()
    assert feed(HEAD + chunked(payload, []), []).failed
    assert not feed(HEAD + chunked(payload + DONE.encode(), []), []).failed


def test_a_finished_stream_with_a_truncated_body_is_broken() -> None:
    wire = (HEAD + chunked(whole_stream(["a"]).removesuffix(DONE).encode(), [])).removesuffix(
        b"0\r\n\r\n"
    )
    assert feed(wire, [], eof=True).failure_kind == "truncated"


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30), CUTS, st.integers(0, 2500))
def test_a_truncated_stream_never_looks_complete(
    texts: list[str], sizes: list[int], cuts: list[int], length: int
) -> None:
    """The client gets either an error event or an incomplete HTTP body."""
    wire = HEAD + chunked(whole_stream(texts).encode(), sizes)
    cut = wire[: min(length, len(wire) - 1)]
    relay = feed(cut, cuts, eof=True)
    assert relay.failure_kind == ("truncated" if len(cut) >= len(HEAD) else "no_answer")
    if not relay.out:
        return  # nothing was forwarded: another endpoint is tried
    _, payload, whole = read(relay.out)
    if whole and not payload.endswith(DONE.encode()):
        assert b"[DONE]" not in payload
        last = payload.rstrip(b"\n").rpartition(b"\n\n")[2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "upstream_error"


@given(st.lists(st.integers(1, 60), max_size=8), CUTS)
def test_an_error_as_the_first_event_can_be_retried(sizes: list[int], cuts: list[int]) -> None:
    relay = feed(HEAD + chunked((ERROR + DONE).encode(), [len(ERROR), *sizes]), cuts)
    assert relay.failure_kind == "engine_error"
    assert relay.out == b""


@given(TEXTS, st.lists(st.integers(1, 200), max_size=20), CUTS)
def test_an_error_later_in_the_stream_is_forwarded_and_recorded(
    texts: list[str], sizes: list[int], cuts: list[int]
) -> None:
    payload = (ROLE + "".join(delta(text) for text in texts) + ERROR).encode()
    relay = feed(HEAD + chunked(payload + DONE.encode(), sizes), cuts)
    if relay.failure_kind is None:
        assert read(relay.out)[1] == payload + DONE.encode()
        assert relay.failed
    else:  # it arrived together with the first bytes
        assert (relay.failure_kind, relay.out) == ("engine_error", b"")


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30), CUTS)
def test_an_alias_replaces_the_model_in_every_event(
    texts: list[str], sizes: list[int], cuts: list[int]
) -> None:
    payload = whole_stream(texts).encode()
    relay = feed(HEAD + chunked(payload, sizes), cuts, alias="my-alias")
    _, body_read, whole = read(relay.out)
    assert whole
    assert body_read == payload.replace(b'"model":"served"', b'"model":"my-alias"')
    assert relay.usage == TokenUsage(17, 2, 16)


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30), CUTS, st.booleans())
def test_an_http_1_0_client_gets_the_bare_events(
    texts: list[str], sizes: list[int], cuts: list[int], aliased: bool
) -> None:
    payload = whole_stream(texts).encode()
    relay = feed(
        HEAD + chunked(payload, sizes), cuts, http_1_0=True, alias="served" if aliased else None
    )
    head, _, body_read = relay.out.partition(b"\r\n\r\n")
    assert body_read == payload
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


@given(TEXTS, CUTS, st.sampled_from(["close", "length"]), st.booleans())
def test_a_stream_with_other_framing_is_rechunked(
    texts: list[str], cuts: list[int], framing: str, finished: bool
) -> None:
    payload = whole_stream(texts).encode()
    payload = payload if finished else payload[: payload.index(b'"finish_reason":"')]
    length = b"content-length: %d\r\n" % len(payload) if framing == "length" else b""
    wire = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + length + b"\r\n" + payload
    relay = feed(wire, cuts, eof=framing == "close")
    _, body_read, whole = read(relay.out)
    assert whole
    assert relay.state is RelayState.DONE
    assert relay.failed is not finished
    assert (
        body_read == payload
        if finished
        else body_read.startswith(payload) and b'"stream_interrupted"' in body_read[len(payload) :]
    )
    assert relay.reusable is (framing == "length")


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


@given(
    CUTS,
    st.sampled_from(["length", "close", "chunked"]),
    st.sampled_from([None, "my-alias"]),
    st.booleans(),
)
def test_a_plain_response_is_relayed_the_same_however_it_is_cut(
    cuts: list[int], framing: str, alias: str | None, http_1_0: bool
) -> None:
    body = chunked(PLAIN, [7, 30]) if framing == "chunked" else PLAIN
    lines = {
        "length": b"Content-Length: %d\r\n" % len(PLAIN),
        "close": b"",
        "chunked": b"Transfer-Encoding: Chunked\r\n",
    }
    wire = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + lines[framing] + b"\r\n" + body
    )
    relay = feed(wire, cuts, eof=framing == "close", alias=alias, http_1_0=http_1_0)
    head, _, rest = relay.out.partition(b"\r\n\r\n")
    body_read = rest if http_1_0 or b"content-length" in head else read(relay.out)[1]
    assert body_read == (
        PLAIN.replace(b'"model":"served",', b'"model":"my-alias",') if alias else PLAIN
    )
    assert relay.usage == TokenUsage(5, 7, None)
    assert relay.finish_reason == "length"
    assert relay.first_tokens == 1
    assert not relay.failed


@given(CUTS, st.binary(max_size=600), st.sampled_from(["length", "chunked"]))
def test_an_engines_error_response_is_collected_and_not_forwarded(
    cuts: list[int], body: bytes, framing: str
) -> None:
    line = (
        b"content-length: %d\r\n" % len(body)
        if framing == "length"
        else b"transfer-encoding: chunked\r\n"
    )
    wire = (
        b"HTTP/1.1 400 Bad Request\r\n"
        + line
        + b"\r\n"
        + (body if framing == "length" else chunked(body, [3, 50]))
    )
    relay = Relay(OWN_HEADERS)
    edges = [0, *sorted({min(cut, len(wire)) for cut in cuts}), len(wire)]
    out = b"".join(relay.feed(wire[a:b], 0.0) for a, b in itertools.pairwise(edges) if a < b)
    assert (out, relay.refusal_body, relay.is_refused, relay.state) == (
        b"",
        body,
        True,
        RelayState.DONE,
    )
    assert relay.head is not None
    assert relay.head.status == 400


@given(
    CUTS,
    st.lists(
        st.sampled_from([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 x\r\nlink: y\r\n\r\n"]),
        max_size=5,
    ),
)
def test_interim_responses_are_skipped(cuts: list[int], interim: list[bytes]) -> None:
    wire = HEAD + chunked(whole_stream(["a"]).encode(), [])
    assert feed(b"".join(interim) + wire, cuts).out == feed(wire, []).out


@given(st.binary(min_size=1, max_size=40), CUTS)
def test_bytes_after_the_end_are_dropped_and_prevent_reuse_of_the_connection(
    surplus: bytes, cuts: list[int]
) -> None:
    wire = HEAD + chunked(whole_stream(["a"]).encode(), [])
    relay = feed(wire + surplus, [len(HEAD) + 3])
    assert relay.out == feed(wire, []).out
    assert not relay.reusable


def test_thousands_of_interim_responses_do_not_exhaust_the_stack() -> None:
    wire = HEAD + chunked(whole_stream(["a"]).encode(), [])
    assert feed(b"HTTP/1.1 100 C\r\n\r\n" * 3000 + wire, []).state is RelayState.DONE


def test_a_long_error_body_is_truncated_and_an_endless_one_is_a_failure() -> None:
    """Engines may repeat a long invalid request in their error message."""
    relay = Relay(OWN_HEADERS)
    relay.feed(b"HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n", 0.0)
    for _ in range(MAX_ERROR_BYTES >> 20):
        relay.feed(b"100000\r\n" + bytes(1 << 20) + b"\r\n", 0.0)
    assert (relay.is_refused, relay.status, len(relay.refusal_body)) == (
        True,
        400,
        MAX_REFUSAL_BYTES,
    )
    with pytest.raises(UpstreamError, match="too long"):
        relay.feed(b"1\r\na\r\n", 0.0)


@given(
    st.text(max_size=600),
    st.lists(st.integers(1, 300), max_size=8),
    CUTS,
    st.sampled_from(["\n\n", "\r\n\r\n"]),
)
def test_a_client_error_at_the_start_of_a_stream_is_a_refusal(
    message: str, sizes: list[int], cuts: list[int], end: str
) -> None:
    """SGLang and vLLM send status 200 before they have checked all of a request."""
    error = json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}})
    events = f"data: {error}{end}{DONE}".encode()
    wire = HEAD + chunked(events, [len(error) + 6 + len(end), *sizes])
    relay = Relay(OWN_HEADERS)
    edges = [0, *sorted({min(cut, len(wire)) for cut in cuts}), len(wire)]
    out = b"".join(relay.feed(wire[a:b], 0.0) for a, b in itertools.pairwise(edges) if a < b)
    assert (out, relay.is_refused, relay.status, relay.state) == (b"", True, 400, RelayState.DONE)
    assert json.loads(relay.refusal_body) == json.loads(error)
    assert relay.is_connection_reusable


def client_error(message: str, end: str = "\n\n") -> str:
    """Return an error event like vLLM's, with the code after the message."""
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return "data: " + json.dumps({"error": error}) + end


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("before", ["", ROLE])
@pytest.mark.parametrize(("length", "step"), [(40, 7), (400, 300), (90_000, 16_384)])
def test_a_client_error_is_recognised_whatever_its_length_and_cuts(
    patient: bool, before: str, length: int, step: int
) -> None:
    """Errors are searched until the first token if that is awaited, else in the first event."""
    if before and not patient:
        return
    wire = HEAD + chunked(
        (before + client_error("x" * length) + DONE).encode(), [len(before) or 10**6]
    )
    relay = Relay(OWN_HEADERS, hold_until_token=patient)
    out = b"".join(
        relay.feed(wire[offset : offset + step], 0.0) for offset in range(0, len(wire), step)
    )
    assert (out, relay.is_refused, relay.status, relay.state) == (b"", True, 400, RelayState.DONE)
    if length < MAX_REFUSAL_BYTES:
        assert json.loads(relay.refusal_body)["error"]["message"] == "x" * length


@pytest.mark.parametrize("patient", [False, True])
def test_an_error_after_a_token_is_the_engines_whatever_its_code(patient: bool) -> None:
    """The request itself is valid. Nothing was forwarded, so another engine is tried."""
    with pytest.raises(UpstreamError, match="error event") as failure_kind:
        Relay(OWN_HEADERS, hold_until_token=patient).feed(
            HEAD + chunked((delta("a") + client_error("no") + DONE).encode(), []), 0.0
        )
    assert failure_kind.value.kind == "engine_error"


def test_a_client_error_may_end_with_its_connection() -> None:
    relay = Relay(OWN_HEADERS)
    relay.feed(
        HEAD.replace(b"transfer-encoding: chunked\r\n", b"") + client_error("no").encode(), 0.0
    )
    assert relay.eof() == b""
    assert json.loads(relay.refusal_body)["error"]["message"] == "no"


def test_a_plain_text_refusal_with_the_type_of_a_stream_is_kept() -> None:
    body = b'{"error":{"message":"nope"}}'
    lines = (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
        % len(body)
    )
    relay = Relay(OWN_HEADERS)
    relay.feed(lines + body, 0.0)
    assert relay.refusal_body == body


@pytest.mark.parametrize("held", [b"", b"4"])
def test_a_stream_that_breaks_between_two_chunks_ends_with_an_error_event(held: bytes) -> None:
    relay = Relay(OWN_HEADERS)
    relay.feed(HEAD + chunked(delta("a").encode(), [])[:-5], 0.0)
    relay.feed(held, 0.0)
    with pytest.raises(UpstreamError, match="bad chunk size line"):
        relay.feed(b"zz\r\n", 0.0)
    assert b"stream_interrupted" in relay.end_with_error(Failure.UPSTREAM_FAILED, "gone")


def test_done_without_its_blank_line_is_not_sent_yet() -> None:
    """Partial events are held back if a model alias has to be replaced in them."""
    relay = Relay(OWN_HEADERS, None, False, ModelNameRewriter("served", "my-alias"))
    relay.feed(
        HEAD + chunked(delta("a").encode(), [])[:-5] + chunked(b"data: [DONE]\n", [])[:-5], 0.0
    )
    assert b"stream_interrupted" in relay.end_with_error(Failure.UPSTREAM_FAILED, "gone")


@given(TEXTS, CUTS, st.sampled_from([None, "my-alias"]), st.booleans())
def test_events_may_end_with_crlf(
    texts: list[str], cuts: list[int], alias: str | None, http_1_0: bool
) -> None:
    payload = whole_stream(texts).replace("\n\n", "\r\n\r\n").encode()
    wire = HEAD + chunked(payload, [len(payload) // 3] * 2)
    relay = feed(wire, cuts, alias=alias, http_1_0=http_1_0)
    body_read = relay.out.partition(b"\r\n\r\n")[2] if http_1_0 else read(relay.out)[1]
    assert body_read == (
        payload.replace(b'"model":"served"', b'"model":"my-alias"') if alias else payload
    )
    assert (relay.usage, relay.events, relay.failed) == (
        TokenUsage(17, 2, 16),
        len(texts) + 4,
        False,
    )


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_only_the_last_partial_event_is_kept(end: str) -> None:
    events = f"data: a{end}data: b{end}".encode()
    assert [
        events[last_event_end(events[:cut]) :].strip()
        for cut in (len(events), len(events) // 2 + 3)
    ] == [b"", b"data: b"]


def test_an_event_with_crlf_is_released_when_complete_under_an_alias() -> None:
    relay = Relay(OWN_HEADERS, None, False, ModelNameRewriter("served", "my-alias"))
    events = [delta(text).replace("\n\n", "\r\n\r\n").encode() for text in "abc"]
    relay.feed(HEAD + chunked(events[0], [])[:-5], 0.0)
    shown = [relay.feed(chunked(event, [])[:-5], 0.0) for event in events[1:]]
    assert [text.count(b"my-alias") for text in shown] == [1, 1]
    assert relay.is_at_boundary


@given(
    TEXTS,
    CUTS,
    st.sampled_from([b"\n", b": ping\n\n", b"\r\n"]),
    st.sampled_from(["\n\n", "\r\n\r\n"]),
)
def test_bytes_after_done_do_not_make_a_complete_response_fail(
    texts: list[str], cuts: list[int], behind: bytes, end: str
) -> None:
    payload = whole_stream(texts).replace("\n\n", end).encode()
    relay = feed(
        HEAD + chunked(payload + behind, [len(payload)]), [*cuts, len(HEAD) + len(payload) + 12]
    )
    assert not relay.failed
    assert b"stream_interrupted" not in relay.out


@given(TEXTS, CUTS)
def test_trailers_are_dropped(texts: list[str], cuts: list[int]) -> None:
    wire = HEAD + chunked(whole_stream(texts).encode(), [50], b"x-secret: abc\r\n")
    assert feed(wire, cuts).out == feed(HEAD + chunked(whole_stream(texts).encode(), [50]), []).out


def test_nothing_is_added_within_a_partially_forwarded_chunk() -> None:
    """The error arrived in one read with the rest of that chunk, which is not forwarded."""
    events = delta("a").encode(), delta("b").encode()
    relay = Relay(OWN_HEADERS)
    whole = chunked(b"".join(events), [])[:-5]
    relay.feed(HEAD + whole[: len(whole) - len(events[1]) - 2], 0.0)
    with pytest.raises(UpstreamError, match="bad chunk size line"):
        relay.feed(whole[len(whole) - len(events[1]) - 2 :] + b"zz\r\n", 0.0)
    assert not relay.is_at_boundary
    assert relay.end_with_error(Failure.UPSTREAM_FAILED, "gone") == b""


@given(CUTS, st.integers(0, 60_000), st.booleans())
def test_token_counts_are_found_however_much_follows_them(
    cuts: list[int], more: int, between: bool
) -> None:
    """Clients may request log probabilities and prompt ids, which come after the counts."""
    ids = json.dumps({"prompt_token_ids": [7] * (more // 2)})[1:].encode()
    body = PLAIN[:-1] + b"," + ids
    if between:
        body = body.replace(b'"usage"', b'"prompt_logprobs":["%b"],"usage"' % (b"x" * more))
    wire = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
        + body
    )
    relay = feed(wire, [*(20 * cut for cut in cuts), len(wire) - 1])
    assert (relay.usage, relay.finish_reason) == (TokenUsage(5, 7, None), "length")
    assert relay.out.endswith(body)


def test_several_connection_fields_are_combined() -> None:
    lines = (
        b"HTTP/1.1 200 OK\r\nconnection: x-a\r\nConnection: x-b , close\r\n"
        b"content-length: 2\r\n\r\n{}"
    )
    relay = feed(lines, [])
    assert (relay.state, relay.reusable) == (RelayState.DONE, False)
    assert feed(lines.replace(b", close", b""), []).reusable


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"transfer-encoding: chunked\r\ncontent-length: 3", "framing"),
        (b"content-length: 3\r\ncontent-length: 4", "framing"),
        (b"content-length: 3\r\ncontent-length: 3", "framing"),
        (b"content-length: +3", "framing"),
        (b"content-length: 3, 3", "framing"),
        (b"content-length: 0x3", "framing"),
        (b"transfer-encoding: gzip, chunked", "framing"),
        (b"transfer-encoding: identity", "framing"),
        (b"transfer-encoding: chunked\r\nTransfer-Encoding: chunked", "framing"),
        (b"transfer-encoding : chunked\r\ncontent-length: 3", "framing"),
        (b"transfer-encoding:\r\n chunked\r\ncontent-length: 3", "framing"),
    ],
)
def test_an_ambiguous_head_is_rejected(head: bytes, kind: str) -> None:
    relay = feed(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + b"abc", [])
    assert (relay.failure_kind, relay.out) == (kind, b"")


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n",
        b"-1\r\nab\r\n",
        b"3\r\nabcde\r\n",
        b"3\nabc\r\n",
        b"1" * 20 + b"\r\n",
        b"0x3\r\nabc\r\n",
    ],
)
def test_malformed_chunks_break_the_response(body: bytes) -> None:
    good = chunked(ROLE.encode(), []).removesuffix(b"0\r\n\r\n")
    relay = feed(HEAD + good + body, [])
    assert relay.failure_kind == "framing"
    _, _, whole = read(relay.out, strict=False)
    assert not whole or b"stream_interrupted" in relay.out


def test_an_endless_head_is_rejected() -> None:
    relay = Relay(OWN_HEADERS)
    relay.feed(b"x-padding: " + b"a" * 65_000, 0.0)
    with pytest.raises(UpstreamError, match="too long"):
        relay.feed(b"a" * 1000, 0.0)


def test_a_bodiless_refusal_ends_with_its_head() -> None:
    relay = feed(b"HTTP/1.1 304 x\r\ncontent-length: 5\r\n\r\n", [])
    assert (relay.state, relay.failure_kind) == (RelayState.DONE, None)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 x\r\n\r\n",
        b"HTTP/1.1 204 x\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ncontent-length: 0\r\n\r\n",
        HEAD + b"0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("alias", [None, "asked"])
def test_an_empty_response_can_be_retried(answer: bytes, alias: str | None) -> None:
    relay = feed(answer, [answer.index(b"\r\n\r\n") + 4], alias=alias)
    assert (relay.failure_kind, relay.out, relay.first_tokens) == ("no_answer", b"", 0)


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
@pytest.mark.parametrize(
    "good", [b"", b"5\r\nhello\r\n", b"%x\r\n%b\r\n" % (len(ROLE), ROLE.encode())]
)
def test_a_response_that_breaks_in_its_first_read_can_be_retried(kind: bytes, good: bytes) -> None:
    head = HEAD.replace(b"text/event-stream", kind)
    relay = feed(head + good + b"zz\r\n" + b"x" * MAX_FIRST_EVENT, [])
    assert (relay.failure_kind, relay.out, relay.first_tokens) == ("framing", b"", 0)


def test_an_encoded_response_is_rejected() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        b"content-encoding: %b\r\ncontent-length: 2\r\n\r\n"
    )
    assert feed(head % b"gzip" + b"\x1f\x8b", []).failure_kind == "framing"
    assert feed(head % b"identity" + b"{}", []).out.endswith(b"{}")
    assert feed((head % b"gzip").replace(b"200", b"400") + b"\x1f\x8b", []).failure_kind is None


def test_a_close_before_the_first_byte_can_be_retried() -> None:
    relay = feed(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", [], eof=True)
    assert (relay.failure_kind, relay.out) == ("truncated", b"")


@pytest.mark.parametrize("reads", [1, 2, 7])
def test_a_head_above_64_kib_is_rejected_in_any_number_of_reads(reads: int) -> None:
    wire = (
        HEAD[:-2]
        + b"".join(b"x-%d: %b\r\n" % (n, b"a" * 1000) for n in range(70))
        + b"\r\n"
        + b"5\r\ndata:\r\n"
    )
    relay = Relay(OWN_HEADERS)
    size = len(wire) // reads + 1
    for offset in range(0, (reads - 1) * size, size):
        relay.feed(wire[offset : offset + size], 0.0)
    with pytest.raises(UpstreamError, match="head is too long"):
        relay.feed(wire[(reads - 1) * size :], 0.0)
    assert relay.head is None


@pytest.mark.parametrize("control", [b"\x00", b"\x01", b"\x0b", b"\x1b", b"\x7f"])
def test_control_bytes_in_a_content_type_are_rejected(control: bytes) -> None:
    relay = Relay(OWN_HEADERS)
    with pytest.raises(UpstreamError, match="control characters"):
        relay.feed(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/%bplain\r\ncontent-length: 2\r\n\r\nhi"
            % control,
            0.0,
        )


def test_many_interim_responses_are_skipped() -> None:
    relay = Relay(OWN_HEADERS)
    assert relay.feed(b"HTTP/1.1 103 \r\n\r\n" * 5000, 0.0) == b""
    assert relay.head is None
    relay.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", 0.0)
    assert relay.status == 0 or relay.is_committed


def test_nothing_is_added_within_a_long_event_under_an_alias() -> None:
    """Part of the event has been forwarded already, because it is too long to be held back."""
    relay = Relay(OWN_HEADERS, None, False, ModelNameRewriter("served", "my-alias"))
    relay.feed(
        HEAD + chunked(delta("a").encode() + b'data: {"long":"' + b"x" * 100_000, [])[:-5], 0.0
    )
    assert not relay.is_at_boundary
    relay.feed(chunked(b'"}\n\n', [])[:-5], 0.0)
    assert relay.is_at_boundary
