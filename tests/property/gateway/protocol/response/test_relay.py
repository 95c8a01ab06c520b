"""Property tests of relaying streamed responses whose bytes are split anywhere."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol.errors import Failure
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.relay_state import RelayState
from gateway.protocol.response.usage_and_error_search import (
    TokenUsage,
    last_event_end,
)
from tests.property.gateway.protocol.response.relay_feed import (
    CUTS,
    DONE,
    HEAD,
    OWN_HEADERS,
    PLAIN,
    ROLE,
    TEXTS,
    USAGE,
    chunked,
    delta,
    feed,
    read,
    whole_stream,
)


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
    wire = HEAD + chunked(whole_stream(texts).encode(), sizes)
    cut = wire[: min(length, len(wire) - 1)]
    relay = feed(cut, cuts, eof=True)
    _, payload, whole = read(relay.out) if relay.out else (b"", b"", False)
    has_done = whole and payload.endswith(DONE.encode())
    problem = "truncated" if len(cut) >= len(HEAD) else "no_answer"
    assert relay.failure_kind == (None if has_done else problem)
    if whole and not has_done:
        assert b"[DONE]" not in payload
        last = payload.rstrip(b"\n").rpartition(b"\n\n")[2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "upstream_error"


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


def test_done_without_its_blank_line_is_not_sent_yet() -> None:
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


@given(CUTS, st.integers(0, 60_000), st.booleans())
def test_token_counts_are_found_however_much_follows_them(
    cuts: list[int], more: int, between: bool
) -> None:
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
