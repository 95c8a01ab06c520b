"""Property tests of streams that break anywhere and are continued by other engines.

The client reads each token exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol import api_table
from gateway.protocol.errors import Failure
from gateway.protocol.response.http_response_parser import LAST_CHUNK, ChunkedBody, encode_chunk
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.protocol.response.relay_state import RelayState
from gateway.protocol.response.resumable_relay import ContinuationRelay, RecordedRelay
from gateway.protocol.response.resume_eligibility import ContinuationTerms, continuation_terms
from gateway.protocol.response.token_ledger import (
    DIVERGED,
    MOST_REPEATED_TOKENS,
    Ledger,
    LedgerRecorder,
)
from tests.unit.gateway.protocol.request import test_request_body

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PROMPT = [7, 8, 9]


def token(number: int) -> str:
    # Return the text of token `number`. Every fifth is empty; the next one has its text too.
    return (
        ""
        if number % 5 == 4
        else f" w{number - 1}w{number}"
        if number % 5 == 0 and number
        else f" w{number}"
    )


def events(
    ids: list[int], total: int, *, chat: bool, opening: bool, model: str = "served"
) -> Iterator[bytes]:
    # Yield the events of an engine that reports token ids and counts.
    #
    # ids      ids of the tokens to stream
    # total    number of tokens after which the response is complete
    # opening  whether it begins with an event without a token
    members = {
        "id": "cmpl-1" if opening else "cmpl-2",
        "created": 5 if opening else 6,
        "model": model,
    }

    def event(choices: list[dict[str, Any]], token_count: int, **more: Any) -> bytes:
        usage = {
            "prompt_tokens": 99,
            "completion_tokens": token_count,
            "total_tokens": 99 + token_count,
        }
        return (
            b"data: "
            + json.dumps(members | {"choices": choices, "usage": usage} | more).encode()
            + b"\n\n"
        )

    if chat:
        yield event(
            [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
            0,
            prompt_token_ids=PROMPT,
        )
    for token_count, number in enumerate(ids, 1):
        reason = "length" if number == total - 1 else None
        text = {"delta": {"content": token(number)}} if chat else {"text": token(number)}
        first = {"prompt_token_ids": PROMPT} if token_count == 1 and not chat else {}
        yield event(
            [{"index": 0, "finish_reason": reason, "token_ids": [number]} | text | first],
            token_count,
        )
    yield event([], len(ids))
    yield b"data: [DONE]\n\n"


def terms(chat: bool, usage: bool, most: int) -> ContinuationTerms:
    body = {"stream": True, "max_tokens": most, "stream_options": {"include_usage": usage}}
    request = (test_request_body.CHAT if chat else test_request_body.COMPLETION) | body
    result = continuation_terms(
        test_request_body.parsed(request, api_table.CHAT if chat else api_table.COMPLETIONS)
    )
    assert result is not None
    return result


def feed(relay: Relay, answer: bytes, size: int, *, eof: bool = True) -> bytes:
    # Feed a response to a relay in pieces of `size` bytes.
    #
    # Returns the bytes for the client until the response breaks.
    out = b""
    try:
        for start in range(0, len(answer), size):
            out += relay.feed(answer[start : start + size], 1.0)
        if eof and relay.state is not RelayState.DONE:
            out += relay.eof()
    except UpstreamError:
        pass
    return out


def read(out: bytes) -> list[dict[str, Any]]:
    # Return the events that the client received. Asserts that the stream ends exactly once.
    body = ChunkedBody()
    payload = body.feed(out.partition(b"\r\n\r\n")[2])
    assert body.is_complete
    assert not body.surplus_bytes
    *chunks, done, rest = payload.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]


def break_stream(parts: Iterator[bytes], share: float, tidily: bool) -> bytes:
    # Return the first `share` of a response.
    #
    # `tidily`: cut between events and end the body properly; otherwise cut anywhere.
    framed = [encode_chunk(part) for part in parts]
    if tidily:
        return HEAD + b"".join(framed[: round(share * len(framed))]) + LAST_CHUNK
    whole = b"".join(framed) + LAST_CHUNK
    return HEAD + whole[: int(share * len(whole))]


@given(
    chat=st.booleans(),
    usage=st.booleans(),
    total=st.integers(1, 40),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=3),
    size=st.integers(1, 900),
)
def test_the_client_reads_the_complete_response_wherever_its_engines_break(
    chat: bool, usage: bool, total: int, cuts: list[tuple[float, bool]], size: int
) -> None:
    ledger = Ledger(terms(chat, usage, total), 1000)
    relay: RecordedRelay = RecordedRelay(
        b"", rewriter=LedgerRecorder(ledger, ledger.render_first, "served", "asked")
    )
    out = feed(
        relay,
        break_stream(events(list(range(total)), total, chat=chat, opening=True), *cuts[0]),
        size,
    )
    if not relay.is_committed:
        assert not out
        return
    for cut in (*cuts[1:], (1.0, False)):
        if relay.state is RelayState.DONE:
            break
        if ledger.current_obstacle:
            assert ledger.current_obstacle == "no_token_ids"
            assert not ledger.shown_ids
            return
        if ledger.is_complete:
            out += encode_chunk(ledger.render_end()) + LAST_CHUNK
            break
        ledger.prepare_rest()
        begun = len(ledger.shown_ids)
        relay = ContinuationRelay(
            b"", rewriter=LedgerRecorder(ledger, ledger.render_rest, "served", "asked")
        )
        rest = events(list(range(begun, total)), total, chat=False, opening=False)
        out += feed(relay, break_stream(rest, *cut), size)
    chunks = read(out)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    shown = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
    assert "".join(shown) == "".join(map(token, range(total)))
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == [
        "length"
    ]
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        ("cmpl-1", 5, "asked")
    }
    assert not any("token_ids" in json.dumps(chunk) for chunk in chunks)
    assert sum("role" in choice.get("delta", {}) for choice in choices) == chat
    counted = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(counted) == usage
    assert all(item["completion_tokens"] == total for item in counted)


@pytest.mark.parametrize("chat", [True, False])
def test_after_several_ids_in_one_event_it_is_unknown_which_were_shown(chat: bool) -> None:
    ledger = Ledger(terms(chat, False, 9), 1000)
    for ids, text, standing in (
        ([1], "a", ""),
        ([2, 3], "b", "ambiguous_ids"),
        ([4], "", "ambiguous_ids"),
        ([5], "c", ""),
    ):
        part = {"delta": {"content": text}} if chat else {"text": text}
        usage = {"completion_tokens": ledger.generated_tokens + len(ids)}
        ledger.render_first(
            {"choices": [{"token_ids": ids} | part], "prompt_token_ids": PROMPT, "usage": usage}
        )
        assert ledger.current_obstacle == standing
    assert list(ledger.shown_ids) == [1, 2, 3, 4, 5]


def grouped(ids: list[int], total: int, sizes: list[int], *, chat: bool, opening: bool) -> bytes:
    # Return the response of an engine that sends the text of several tokens in one event.
    parts, number = [], 0
    chunks = [*events(ids, total, chat=chat, opening=opening)]
    first = chunks[: 1 if chat else 0]
    steps = chunks[len(first) : -2]
    while steps:
        size = sizes[number % len(sizes)]
        group = [json.loads(step.removeprefix(b"data: ")) for step in steps[:size]]
        del steps[:size]
        number += 1
        choices = [item["choices"][0] for item in group]
        key = "delta" if chat else "text"
        texts = [choice[key]["content"] if chat else choice[key] for choice in choices]
        merged = choices[-1] | {
            "token_ids": [one for choice in choices for one in choice["token_ids"]],
            key: {"content": "".join(texts)} if chat else "".join(texts),
        }
        whole = group[-1] | {"choices": [merged]}
        if "prompt_token_ids" in group[0]:
            whole["prompt_token_ids"] = PROMPT
        parts.append(b"data: " + json.dumps(whole).encode() + b"\n\n")
    return HEAD + b"".join(map(encode_chunk, [*first, *parts, *chunks[-2:]])) + LAST_CHUNK


@given(
    chat=st.booleans(),
    total=st.integers(1, 40),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    size=st.integers(1, 900),
)
def test_text_that_came_with_several_ids_is_generated_again_and_shown_once(
    chat: bool, total: int, cuts: list[float], sizes: list[int], size: int
) -> None:
    ledger = Ledger(terms(chat, True, total), 1000)
    relay: RecordedRelay = RecordedRelay(
        b"", rewriter=LedgerRecorder(ledger, ledger.render_first, "served", "asked")
    )
    answer = grouped([*range(total)], total, sizes, chat=chat, opening=True)
    out = feed(relay, answer[: int(cuts[0] * len(answer))], size)
    if not relay.is_committed:
        return
    for cut in (*cuts[1:], 1.0):
        if relay.state is RelayState.DONE:
            break
        if ledger.rest_obstacle:
            assert ledger.rest_obstacle == "no_token_ids"
            return
        if not ledger.current_obstacle and ledger.is_complete:
            out += encode_chunk(ledger.render_end()) + LAST_CHUNK
            break
        ledger.prepare_rest()
        relay = ContinuationRelay(
            b"", rewriter=LedgerRecorder(ledger, ledger.render_rest, "served", "asked")
        )
        left = [*range(len(ledger.shown_ids), total)]
        rest = grouped(left, total, sizes[::-1], chat=False, opening=False)
        out += feed(relay, rest[: int(cut * len(rest))], size)
    chunks = read(out)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    shown = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
    assert "".join(shown) == "".join(map(token, range(total)))
    (counted,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert counted["completion_tokens"] == total


def piece(ids: list[int], text: str, count: int, reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": reason}
    return {
        "choices": [choice],
        "prompt_token_ids": PROMPT,
        "usage": {"completion_tokens": count},
    }


def ambiguous_ledger() -> Ledger:
    ledger = Ledger(terms(False, False, 9), 1000)
    ledger.render_first(piece([1], "a", 1))
    ledger.render_first(piece([2, 3], "bc", 3))
    ledger.prepare_rest()
    assert list(ledger.shown_ids) == [1]
    return ledger


@pytest.mark.parametrize(
    ("pieces", "is_last"), [(["bd"], False), (["b", "d"], False), (["b"], True), ([""], True)]
)
def test_text_that_comes_out_differently_ends_the_continuation(
    pieces: list[str], is_last: bool
) -> None:
    ledger = ambiguous_ledger()
    *same, other = pieces
    for count, text in enumerate(same, 1):
        assert ledger.render_rest(piece([9], text, count)) == b""
    reason = "stop" if is_last else None
    with pytest.raises(UpstreamError) as raised:
        ledger.render_rest(piece([9], other, len(pieces), reason))
    assert raised.value.kind == DIVERGED


def test_a_batch_does_not_keep_ids_whose_text_is_not_all_that_its_answer_has() -> None:
    ledger = ambiguous_ledger()
    assert ledger.current_obstacle == "ambiguous_ids"
    ledger.render_rest(piece([2], "b", 1))
    assert (ledger.current_obstacle, ledger.rest_obstacle) == ("ambiguous_ids", "")
    ledger.render_rest(piece([3], "c", 2))
    assert ledger.current_obstacle == ""
    assert list(ledger.shown_ids) == [1, 2, 3]


def test_a_long_stretch_with_several_ids_per_piece_is_not_generated_again() -> None:
    ledger = Ledger(terms(False, False, 5000), 10_000)
    for count in range(2, 2 + MOST_REPEATED_TOKENS + 2, 2):
        ledger.render_first(piece([1, 2], "ab", count))
    assert ledger.rest_obstacle == "ambiguous_ids"
    ledger.render_first(piece([3], "c", count + 1))
    assert ledger.rest_obstacle == ""


@pytest.mark.parametrize(("chat", "standing"), [(True, "no_token_ids"), (False, "")])
def test_a_chat_without_visible_text_is_not_continued_because_it_may_begin_with_reasoning(
    chat: bool, standing: str
) -> None:
    ledger = Ledger(terms(chat, False, 9), 1000)
    part = {"delta": {"role": "assistant", "content": ""}} if chat else {"text": ""}
    ledger.render_first(
        {
            "choices": [{"token_ids": [1]} | part],
            "prompt_token_ids": PROMPT,
            "usage": {"completion_tokens": 1},
        }
    )
    assert ledger.current_obstacle == standing
    part["finish_reason"] = "stop"
    ledger.render_first({"choices": [{"token_ids": [2]} | part], "usage": {"completion_tokens": 2}})
    assert (ledger.current_obstacle, ledger.is_complete) == ("", True), "only the end is missing"


@pytest.mark.parametrize(
    ("chunk", "obstacle"),
    [
        ({"choices": [{"delta": {"content": "a"}, "token_ids": [1]}]}, "uncounted"),
        (
            {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 1}},
            "uncounted",
        ),
        (
            {
                "choices": [{"delta": {"reasoning": "a"}, "token_ids": [1]}],
                "usage": {"completion_tokens": 1},
            },
            "parsed",
        ),
        (
            {
                "choices": [{"delta": {"content": "a"}, "token_ids": [1] * 9}],
                "usage": {"completion_tokens": 9},
            },
            "too_long",
        ),
        (
            {
                "choices": [{"delta": {"content": "a"}, "token_ids": [1]}],
                "usage": {"completion_tokens": 1},
            },
            "",
        ),
    ],
)
def test_a_response_not_known_token_by_token_is_not_continued(
    chunk: dict[str, Any], obstacle: str
) -> None:
    ledger = Ledger(terms(True, False, 99), 10)
    ledger.render_first(chunk | {"prompt_token_ids": PROMPT})
    assert ledger.current_obstacle == obstacle


def test_tokens_read_together_with_an_error_were_not_shown_and_are_requested_again() -> None:
    ledger = Ledger(terms(True, False, 9), 1000)
    recorder = LedgerRecorder(ledger, ledger.render_first, "served", "asked")
    parts = [*events([0, 1, 2], 9, chat=True, opening=True)]
    assert recorder.feed(b"".join(parts[:2]), is_sse=True, is_complete=False)
    for broken in (
        b'data: {"error": {"message": "dead"}}\n\n',
        b"data: {nonsense\n\n",
        b'data: {"choices": 3}\n\n',
    ):
        with pytest.raises(UpstreamError):
            recorder.feed(parts[2] + broken, is_sse=True, is_complete=False)
        assert list(ledger.shown_ids) == [0]
    assert ledger.generated_tokens == 1


def test_an_aborted_request_is_not_a_complete_response() -> None:
    ledger = Ledger(terms(True, False, 9), 1000)
    relay = RecordedRelay(
        b"", rewriter=LedgerRecorder(ledger, ledger.render_first, "served", "asked")
    )
    parts = [*events([0, 1], 9, chat=True, opening=True)]
    relay.feed(HEAD + b"".join(map(encode_chunk, parts[:2])), 1.0)
    aborted = parts[2].replace(b'"finish_reason": null', b'"finish_reason": "abort"')
    with pytest.raises(UpstreamError, match="aborted the request"):
        relay.feed(encode_chunk(aborted), 2.0)
    assert relay.is_at_boundary
    assert list(ledger.shown_ids) == [0]


@pytest.mark.parametrize(
    "end", [encode_chunk(b'data: {"error": {"message": "dead"}}\n\n'), LAST_CHUNK]
)
def test_a_response_that_breaks_with_its_first_events_has_not_begun(end: bytes) -> None:
    stream_bytes: list[None] = []
    ledger = Ledger(terms(True, False, 9), 1000)
    relay = RecordedRelay(
        b"",
        lambda: stream_bytes.append(None),
        rewriter=LedgerRecorder(ledger, ledger.render_first, "served", "asked"),
    )
    first, *_ = events([0], 9, chat=True, opening=True)
    with pytest.raises(UpstreamError):
        relay.feed(HEAD + encode_chunk(first) + end, 1.0)
    assert not relay.is_committed
    assert not stream_bytes  # no first token was reported, so a retry still has the body


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_a_body_that_ends_after_its_finish_reason_is_complete_without_done(
    chat: bool, counted: bool
) -> None:
    ledger = Ledger(terms(chat, True, 6), 1000)
    relay = RecordedRelay(
        b"",
        None,
        False,
        LedgerRecorder(ledger, ledger.render_first, "served", "asked"),
        hold_until_token=True,
    )
    parts = list(events(list(range(6)), 6, chat=chat, opening=True))[: -1 if counted else -2]
    out = feed(relay, HEAD + b"".join(map(encode_chunk, parts)) + LAST_CHUNK, 10**6)
    assert (relay.state, relay.has_error_event) == (RelayState.DONE, False)
    *_, last = read(out)
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9} | (
        {"prompt_tokens": 99, "total_tokens": 105} if counted else {}
    )
    assert out.count(b"[DONE]") == 1


def test_a_final_event_not_shown_to_the_client_does_not_end_its_stream() -> None:
    ledger = Ledger(terms(True, False, 9), 1000)
    relay = RecordedRelay(
        b"", rewriter=LedgerRecorder(ledger, ledger.render_first, "served", "asked")
    )
    first, *_ = events([0], 9, chat=True, opening=True)
    relay.feed(HEAD + encode_chunk(first), 1.0)
    with pytest.raises(UpstreamError):
        relay.feed(
            encode_chunk(b'data: {"error": {"message": "dead"}}\n\ndata: [DONE]\n\n') + LAST_CHUNK,
            2.0,
        )
    assert b'"error"' in relay.end_with_error(Failure.UPSTREAM_FAILED, "gone")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("first", "last", "shown"),
    [
        ({"cached_tokens": 2}, {"cached_tokens": 8}, {"cached_tokens": 2}),
        ({"cached_tokens": 2}, None, {"cached_tokens": 2}),
        (None, {"cached_tokens": 8, "audio_tokens": 0}, {"cached_tokens": 3, "audio_tokens": 0}),
        (None, {"cached_tokens": None}, {"cached_tokens": None}),
        (None, None, None),
    ],
    ids=["both", "the first", "the last", "neither counts", "neither"],
)
def test_the_usage_of_a_continued_stream_keeps_the_details_of_its_prompt(
    first: dict[str, int] | None,
    last: dict[str, int] | None,
    shown: dict[str, int] | None,
    chat: bool,
) -> None:
    ledger = Ledger(terms(chat, True, 6), 1000)
    for begun, ids, details, show in (
        (True, [0, 1], first, ledger.render_first),
        (False, [2, 3, 4, 5], last, ledger.render_rest),
    ):
        detailed = {"prompt_tokens_details": details}
        parts = [*events(ids, 6, chat=chat and begun, opening=begun)][: -2 if begun else None]
        stream_bytes = b"".join(parts).replace(
            b'"total_tokens"', json.dumps(detailed).encode()[1:-1] + b', "total_tokens"'
        )
        out = LedgerRecorder(ledger, show, "served", "asked").feed(
            stream_bytes, is_sse=True, is_complete=False
        )
        if begun:
            ledger.prepare_rest()
    usage = json.loads(out.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
    assert usage == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": shown,
    }
    assert ledger.usage.cached_tokens == (None if shown is None else shown["cached_tokens"])


def test_a_stream_that_lacks_only_its_end_keeps_the_details_of_its_prompt() -> None:
    ledger = Ledger(terms(True, True, 1), 1000)
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    choice = {"index": 0, "delta": {"content": "a"}, "token_ids": [1]}
    ledger.render_first({"choices": [choice], "prompt_token_ids": PROMPT, "usage": usage})
    assert b'"prompt_tokens_details":{"cached_tokens":2}' in ledger.render_end()
