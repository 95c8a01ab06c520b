"""Property tests of relaying errors: which ones reach the client, and which allow a retry."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.errors import Failure
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.relay import MAX_ERROR_BYTES, Relay, UpstreamError
from gateway.protocol.response.relay_state import BEHIND, RelayState
from gateway.protocol.response.usage_and_error_search import (
    MAX_FIRST_EVENT,
    MAX_REFUSAL_BYTES,
)
from tests.property.gateway.protocol.response.relay_feed import (
    CUTS,
    DONE,
    HEAD,
    OWN_HEADERS,
    ROLE,
    TEXTS,
    chunked,
    delta,
    feed,
    read,
)

ERROR = "data: " + json.dumps({"error": {"message": "engine died", "code": 500}}) + "\n\n"


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
    else:  # the error arrived together with the first bytes
        assert (relay.failure_kind, relay.out) == ("engine_error", b"")


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


def test_a_long_error_body_is_truncated_and_an_endless_one_is_a_failure() -> None:
    relay = Relay(OWN_HEADERS)
    relay.feed(b"HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n", 0.0)
    for _ in range(MAX_ERROR_BYTES >> 20):
        relay.feed(b"100000\r\n" + bytes(1 << 20) + b"\r\n", 0.0)
    assert (relay.is_refused, relay.status) == (True, 400)
    with pytest.raises(UpstreamError, match="longer than"):
        relay.feed(b"1\r\na\r\n", 0.0)
    truncated = Relay(OWN_HEADERS)
    truncated.feed(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 1048576\r\n\r\n", 0.0)
    truncated.feed(bytes(1 << 20), 0.0)
    assert len(truncated.refusal_body) == MAX_REFUSAL_BYTES


@given(
    st.text(max_size=600),
    st.lists(st.integers(1, 300), max_size=8),
    CUTS,
    st.sampled_from(["\n\n", "\r\n\r\n"]),
    st.booleans(),
)
def test_a_client_error_at_the_start_of_a_stream_is_a_refusal(
    message: str, sizes: list[int], cuts: list[int], end: str, is_flat: bool
) -> None:
    # SGLang and vLLM send status 200 before they have checked all of a request.
    members = {"message": message, "type": "BadRequestError", "code": 400}
    error = json.dumps({"object": "error", **members} if is_flat else {"error": members})
    events = f"data: {error}{end}{DONE}".encode()
    wire = HEAD + chunked(events, [len(error) + 6 + len(end), *sizes])
    relay = Relay(OWN_HEADERS)
    edges = [0, *sorted({min(cut, len(wire)) for cut in cuts}), len(wire)]
    out = b"".join(relay.feed(wire[a:b], 0.0) for a, b in itertools.pairwise(edges) if a < b)
    assert (out, relay.is_refused, relay.status, relay.state) == (b"", True, 400, RelayState.DONE)
    assert json.loads(relay.refusal_body) == json.loads(error)
    assert relay.is_connection_reusable


def client_error(message: str, end: str = "\n\n") -> str:
    # Return an error event like vLLM's, with the code after the message.
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return "data: " + json.dumps({"error": error}) + end


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("before", ["", ROLE])
@pytest.mark.parametrize(("length", "step"), [(40, 7), (400, 300), (90_000, 16_384)])
def test_a_client_error_is_recognised_whatever_its_length_and_cuts(
    patient: bool, before: str, length: int, step: int
) -> None:
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
    with pytest.raises(UpstreamError, match="chunk size line of the engine"):
        relay.feed(b"zz\r\n", 0.0)
    assert b"stream_interrupted" in relay.end_with_error(Failure.UPSTREAM_FAILED, "gone")


def test_nothing_is_added_within_a_partially_forwarded_chunk() -> None:
    events = delta("a").encode(), delta("b").encode()
    relay = Relay(OWN_HEADERS)
    whole = chunked(b"".join(events), [])[:-5]
    relay.feed(HEAD + whole[: len(whole) - len(events[1]) - 2], 0.0)
    with pytest.raises(UpstreamError, match="chunk size line of the engine"):
        relay.feed(whole[len(whole) - len(events[1]) - 2 :] + b"zz\r\n", 0.0)
    assert not relay.is_at_boundary
    assert relay.end_with_error(Failure.UPSTREAM_FAILED, "gone") == b""


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


def test_a_close_before_the_first_byte_can_be_retried() -> None:
    relay = feed(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", [], eof=True)
    assert (relay.failure_kind, relay.out) == ("truncated", b"")


def test_nothing_is_added_within_a_long_event_under_an_alias() -> None:
    # Part of the event has been forwarded already, because it is too long to be held back.
    relay = Relay(OWN_HEADERS, None, False, ModelNameRewriter("served", "my-alias"))
    relay.feed(
        HEAD + chunked(delta("a").encode() + b'data: {"long":"' + b"x" * 100_000, [])[:-5], 0.0
    )
    while relay.state is BEHIND:
        relay.feed(b"", 0.0)
    assert not relay.is_at_boundary
    relay.feed(chunked(b'"}\n\n', [])[:-5], 0.0)
    assert relay.is_at_boundary


def whole_answer(body: bytes, framing: str, content_type: str = "application/json") -> bytes:
    line, data = {
        "length": (b"content-length: %d\r\n" % len(body), body),
        "chunked": (b"transfer-encoding: chunked\r\n", chunked(body, [30])),
        "close": (b"", body),
    }[framing]
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n%b" % (content_type.encode(), line, data)


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("alias", [None, "asked"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_web_page_in_place_of_an_answer_can_be_retried(
    framing: str, alias: str | None, is_cut: bool
) -> None:
    wire = whole_answer(b"<html>log in</html>", framing, "text/html; charset=utf-8")
    relay = feed(wire, [wire.index(b"\r\n\r\n") + 4] if is_cut else [], alias=alias)
    assert (relay.failure_kind, relay.out, relay.first_tokens) == ("web_page", b"", 0)


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_error_with_status_200_can_be_retried_or_is_a_refusal(
    framing: str, indent: int | None, is_cut: bool
) -> None:
    broken = json.dumps({"error": {"message": "overloaded", "code": 503}}, indent=indent).encode()
    wire = whole_answer(broken, framing)
    cuts = [wire.index(b"\r\n\r\n") + 4] if is_cut else []
    relay = feed(wire, cuts, eof=framing == "close")
    assert (relay.failure_kind, relay.out, relay.first_tokens) == ("engine_error", b"", 0)
    refused = json.dumps({"error": {"code": 400, "message": "bad"}}, indent=indent).encode()
    wire = whole_answer(refused, framing)
    cut = wire.index(b"\r\n\r\n") + 4 if is_cut else len(wire)
    refusal = Relay(OWN_HEADERS)
    out = b"".join(refusal.feed(part, 0.0) for part in (wire[:cut], wire[cut:]) if part)
    if framing == "close":
        out += refusal.eof()
    assert (out, refusal.is_refused, refusal.status) == (b"", True, 400)
    assert json.loads(refusal.refusal_body)["error"]["message"] == "bad"


def test_an_answer_that_mentions_an_error_is_forwarded() -> None:
    for body in (b'{"error":null,"id":"c1"}', b'{"id":"c1","error":{"code":1}}', b'["error"]'):
        relay = feed(whole_answer(body, "length"), [])
        assert (relay.failure_kind, relay.out.endswith(body)) == (None, True)
