"""The relay fed with the same answer cut anywhere: what the client reads and what is accounted must not change."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import Failure
from gateway.relay import ERROR_MOST, Relay, State, UpstreamBroke
from gateway.rename import Renamer
from gateway.told import ERROR_KEPT, FIRST_EVENT, Usage, last_end

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
OURS = b"x-request-id: req_1\r\n"
DONE = "data: [DONE]\n\n"
ERROR = "data: " + json.dumps({"error": {"message": "engine died", "code": 500}}) + "\n\n"


@dataclass(frozen=True)
class Seen:
    """What one feeding of an answer led to."""

    out: bytes
    state: State
    usage: Usage
    finish_reason: str | None
    events: int
    first_token: bool
    firsts: int
    failed: bool
    reusable: bool
    broke: str | None


def feed(
    data: bytes,
    cuts: list[int],
    *,
    eof: bool = False,
    http_1_0: bool = False,
    alias: str | None = None,
    choices: int = 1,
) -> Seen:
    firsts: list[None] = []
    renamer = Renamer("served", alias) if alias else None
    relay = Relay(OURS, lambda: firsts.append(None), http_1_0, renamer, choices=choices)
    out, broke = b"", None
    edges = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    try:
        for now, (start, stop) in enumerate(itertools.pairwise(edges)):
            if start < stop and relay.state is not State.DONE:
                out += relay.feed(data[start:stop], float(now))
        if eof and relay.state is not State.DONE:
            out += relay.eof()
    except UpstreamBroke as error:
        broke = error.kind
        if relay.committed:
            out += relay.break_off(Failure.UPSTREAM_FAILED, "gone")
    return Seen(
        out,
        relay.state,
        relay.usage,
        relay.finish_reason,
        relay.events,
        relay.first_token_at is not None,
        len(firsts),
        relay.failed_in_stream,
        relay.reusable,
        broke,
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
ROLE = 'data: {"id":"c1","model":"served","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TEXTS = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 2500), max_size=60)


def story(texts: list[str]) -> str:
    """The payload of a good stream."""
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
    """The payload in HTTP chunks of these sizes, the rest in one."""
    wire, at = b"", 0
    for size in [*sizes, len(payload)]:
        piece = payload[at : at + size]
        if piece:
            wire += b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)
        at += len(piece)
    return wire + b"0\r\n" + trailers + b"\r\n"


def read(out: bytes, *, strict: bool = True) -> tuple[bytes, bytes, bool]:
    """Head, payload and whether it ended properly, as a client with a strict HTTP parser reads them."""
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
def test_a_stream_is_the_same_however_the_network_cut_it(
    texts: list[str], sizes: list[int], cuts: list[int], trailers: bytes, extended: bool
) -> None:
    payload = story(texts).encode()
    wire = HEAD + chunked(payload, sizes, trailers, b";a=b" if extended else b"")
    seen = feed(wire, cuts)
    head, read_payload, whole = read(seen.out)
    assert (read_payload, whole) == (payload, True)
    assert OURS.strip() in head
    assert head.count(b"content-type: text/event-stream; charset=utf-8") == 1
    assert seen == feed(wire, [])
    assert seen.state is State.DONE
    assert seen.usage == Usage(17, 2, 16)
    assert seen.finish_reason == "stop"
    assert seen.events == len(texts) + 4
    assert seen.first_token
    assert seen.firsts == 1
    assert not seen.failed
    assert seen.reusable


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30))
def test_a_stream_may_come_byte_by_byte(texts: list[str], sizes: list[int]) -> None:
    wire = HEAD + chunked(story(texts).encode(), sizes)
    assert feed(wire, list(range(len(wire)))) == feed(wire, [])


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30), CUTS, st.booleans(), st.integers(0, 40))
def test_a_stream_that_ends_without_done_ends_with_an_error_and_no_done(
    texts: list[str], sizes: list[int], cuts: list[int], trailers: bool, short: int
) -> None:
    """Properly framed, but its last event is missing or cut: whatever the chunking, the client reads an error event."""
    payload = (ROLE + "".join(delta(text) for text in texts)).encode()
    payload = payload[: len(payload) - short]
    wire = HEAD + chunked(payload, sizes, b"a: b\r\n" if trailers else b"")
    seen = feed(wire, cuts)
    _, got, whole = read(seen.out)
    assert whole
    assert got.startswith(payload)
    *_, last, rest = got.split(b"\n\n")
    assert rest == b""
    assert json.loads(last.strip().removeprefix(b"data: "))["error"]["code"] == "stream_interrupted"
    assert b"[DONE]" not in got
    assert seen.failed
    assert seen == feed(wire, [])


@st.composite
def several(draw: st.DrawFn) -> tuple[list[str], int]:
    """The events of some choices, in any order that keeps each one's own, with and without blanks; how many choices."""
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
    several(),
    st.lists(st.integers(1, 200), max_size=30),
    CUTS,
    st.sampled_from([None, "my-alias"]),
    st.booleans(),
)
def test_a_stream_that_ends_properly_once_every_choice_is_finished_is_whole_and_gets_its_done(
    told: tuple[list[str], int],
    sizes: list[int],
    cuts: list[int],
    alias: str | None,
    http_1_0: bool,
) -> None:
    events, choices = told
    payload = "".join(events).encode()
    seen = feed(
        HEAD + chunked(payload, sizes), cuts, alias=alias, http_1_0=http_1_0, choices=choices
    )
    got = seen.out.partition(b"\r\n\r\n")[2] if http_1_0 else read(seen.out)[1]
    if alias is not None:
        payload = re.sub(rb'("model": ?)"served"', rb'\1"my-alias"', payload)
    assert got == payload + DONE.encode()
    assert (seen.state, seen.failed, seen.broke, seen.reusable) == (State.DONE, False, None, True)


@given(several(), st.lists(st.integers(1, 200), max_size=30), CUTS, st.data())
def test_a_stream_that_ends_properly_while_a_choice_is_unfinished_is_broken(
    told: tuple[list[str], int], sizes: list[int], cuts: list[int], data: st.DataObject
) -> None:
    events, choices = told
    finishing = [event for event in events if '"finish_reason"' in event and "null" not in event]
    lost = data.draw(st.sampled_from([*finishing, None]))
    kept = [event for event in events if event != lost]
    payload = "".join(kept).encode()[: None if lost else -1]
    seen = feed(
        HEAD + chunked(payload, sizes),
        cuts,
        choices=choices + (lost is None and payload.endswith(b"}\n")),
    )
    got = read(seen.out)[1]
    assert b"[DONE]" not in got
    assert b'"stream_interrupted"' in got
    assert seen.failed


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_stream_that_its_engine_gave_up_is_not_whole_without_done(reason: str) -> None:
    payload = (ROLE + delta("a") + delta("", finish_reason=reason)).encode()
    assert feed(HEAD + chunked(payload, []), []).failed
    assert not feed(HEAD + chunked(payload + DONE.encode(), []), []).failed


def test_a_finished_stream_whose_body_does_not_end_is_broken() -> None:
    wire = (HEAD + chunked(story(["a"]).removesuffix(DONE).encode(), [])).removesuffix(b"0\r\n\r\n")
    assert feed(wire, [], eof=True).broke == "truncated"


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30), CUTS, st.integers(0, 2500))
def test_a_stream_cut_short_never_passes_for_whole(
    texts: list[str], sizes: list[int], cuts: list[int], length: int
) -> None:
    """The connection ends early: either the client reads an error event, or an HTTP body that does not end."""
    wire = HEAD + chunked(story(texts).encode(), sizes)
    cut = wire[: min(length, len(wire) - 1)]
    seen = feed(cut, cuts, eof=True)
    assert seen.broke == ("truncated" if len(cut) >= len(HEAD) else "no_answer")
    if not seen.out:
        return  # nothing has gone out: another endpoint answers
    _, payload, whole = read(seen.out)
    if whole and not payload.endswith(DONE.encode()):
        assert b"[DONE]" not in payload
        last = payload.rstrip(b"\n").rpartition(b"\n\n")[2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "upstream_error"


@given(st.lists(st.integers(1, 60), max_size=8), CUTS)
def test_an_error_as_first_event_can_still_be_retried(sizes: list[int], cuts: list[int]) -> None:
    seen = feed(HEAD + chunked((ERROR + DONE).encode(), [len(ERROR), *sizes]), cuts)
    assert seen.broke == "engine_error"
    assert seen.out == b""


@given(TEXTS, st.lists(st.integers(1, 200), max_size=20), CUTS)
def test_an_error_later_in_the_stream_passes_and_is_known(
    texts: list[str], sizes: list[int], cuts: list[int]
) -> None:
    payload = (ROLE + "".join(delta(text) for text in texts) + ERROR).encode()
    seen = feed(HEAD + chunked(payload + DONE.encode(), sizes), cuts)
    if seen.broke is None:
        assert read(seen.out)[1] == payload + DONE.encode()
        assert seen.failed
    else:  # it came together with the first bytes
        assert (seen.broke, seen.out) == ("engine_error", b"")


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30), CUTS)
def test_an_alias_takes_the_models_place_in_every_event(
    texts: list[str], sizes: list[int], cuts: list[int]
) -> None:
    payload = story(texts).encode()
    seen = feed(HEAD + chunked(payload, sizes), cuts, alias="my-alias")
    _, got, whole = read(seen.out)
    assert whole
    assert got == payload.replace(b'"model":"served"', b'"model":"my-alias"')
    assert seen.usage == Usage(17, 2, 16)


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30), CUTS, st.booleans())
def test_a_client_of_http_1_0_reads_the_bare_events(
    texts: list[str], sizes: list[int], cuts: list[int], aliased: bool
) -> None:
    payload = story(texts).encode()
    seen = feed(
        HEAD + chunked(payload, sizes), cuts, http_1_0=True, alias="served" if aliased else None
    )
    head, _, got = seen.out.partition(b"\r\n\r\n")
    assert got == payload
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


@given(TEXTS, CUTS, st.sampled_from(["close", "length"]), st.booleans())
def test_a_stream_in_any_other_framing_reaches_the_client_in_chunks(
    texts: list[str], cuts: list[int], framing: str, finished: bool
) -> None:
    payload = story(texts).encode()
    payload = payload if finished else payload[: payload.index(b'"finish_reason":"')]
    length = b"content-length: %d\r\n" % len(payload) if framing == "length" else b""
    wire = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + length + b"\r\n" + payload
    seen = feed(wire, cuts, eof=framing == "close")
    _, got, whole = read(seen.out)
    assert whole
    assert seen.state is State.DONE
    assert seen.failed is not finished
    assert (
        got == payload
        if finished
        else got.startswith(payload) and b'"stream_interrupted"' in got[len(payload) :]
    )
    assert seen.reusable is (framing == "length")


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
def test_a_plain_answer_is_the_same_however_it_comes(
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
    seen = feed(wire, cuts, eof=framing == "close", alias=alias, http_1_0=http_1_0)
    head, _, rest = seen.out.partition(b"\r\n\r\n")
    got = rest if http_1_0 or b"content-length" in head else read(seen.out)[1]
    assert got == (PLAIN.replace(b'"model":"served",', b'"model":"my-alias",') if alias else PLAIN)
    assert seen.usage == Usage(5, 7, None)
    assert seen.finish_reason == "length"
    assert seen.firsts == 1
    assert not seen.failed


@given(CUTS, st.binary(max_size=600), st.sampled_from(["length", "chunked"]))
def test_an_engines_refusal_is_collected_and_nothing_goes_out(
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
    relay = Relay(OURS)
    edges = [0, *sorted({min(cut, len(wire)) for cut in cuts}), len(wire)]
    out = b"".join(relay.feed(wire[a:b], 0.0) for a, b in itertools.pairwise(edges) if a < b)
    assert (out, relay.refusal, relay.refused, relay.state) == (b"", body, True, State.DONE)
    assert relay.head is not None
    assert relay.head.status == 400


@given(
    CUTS,
    st.lists(
        st.sampled_from([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 x\r\nlink: y\r\n\r\n"]),
        max_size=5,
    ),
)
def test_interim_answers_are_passed_over(cuts: list[int], interim: list[bytes]) -> None:
    wire = HEAD + chunked(story(["a"]).encode(), [])
    assert feed(b"".join(interim) + wire, cuts).out == feed(wire, []).out


@given(st.binary(min_size=1, max_size=40), CUTS)
def test_bytes_after_the_end_are_not_shown_and_spoil_the_connection(
    surplus: bytes, cuts: list[int]
) -> None:
    wire = HEAD + chunked(story(["a"]).encode(), [])
    seen = feed(wire + surplus, [len(HEAD) + 3])
    assert seen.out == feed(wire, []).out
    assert not seen.reusable


def test_thousands_of_interim_answers_in_one_read_do_not_exhaust_the_stack() -> None:
    wire = HEAD + chunked(story(["a"]).encode(), [])
    assert feed(b"HTTP/1.1 100 C\r\n\r\n" * 3000 + wire, []).state is State.DONE


def test_of_a_long_refusal_the_beginning_is_kept_and_an_endless_one_is_the_engines_failure() -> (
    None
):
    """An engine that repeats a bad request in what it says of it is not at fault for its length."""
    relay = Relay(OURS)
    relay.feed(b"HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n", 0.0)
    for _ in range(ERROR_MOST >> 20):
        relay.feed(b"100000\r\n" + bytes(1 << 20) + b"\r\n", 0.0)
    assert (relay.refused, relay.status, len(relay.refusal)) == (True, 400, ERROR_KEPT)
    with pytest.raises(UpstreamBroke, match="too long"):
        relay.feed(b"1\r\na\r\n", 0.0)


@given(
    st.text(max_size=600),
    st.lists(st.integers(1, 300), max_size=8),
    CUTS,
    st.sampled_from(["\n\n", "\r\n\r\n"]),
)
def test_a_fault_of_the_clients_that_a_stream_begins_with_is_a_refusal(
    message: str, sizes: list[int], cuts: list[int], end: str
) -> None:
    """SGLang and vLLM say 200 before they have looked at all of a request."""
    error = json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}})
    events = f"data: {error}{end}{DONE}".encode()
    wire = HEAD + chunked(events, [len(error) + 6 + len(end), *sizes])
    relay = Relay(OURS)
    edges = [0, *sorted({min(cut, len(wire)) for cut in cuts}), len(wire)]
    out = b"".join(relay.feed(wire[a:b], 0.0) for a, b in itertools.pairwise(edges) if a < b)
    assert (out, relay.refused, relay.status, relay.state) == (b"", True, 400, State.DONE)
    assert json.loads(relay.refusal) == json.loads(error)
    assert relay.reusable


def fault(message: str, end: str = "\n\n") -> str:
    """As vLLM tells a fault of a request in its stream: the code behind the message."""
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return "data: " + json.dumps({"error": error}) + end


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("before", ["", ROLE])
@pytest.mark.parametrize(("length", "step"), [(40, 7), (400, 300), (90_000, 16_384)])
def test_a_clients_fault_is_one_however_long_it_is_and_wherever_the_network_cuts_it(
    patient: bool, before: str, length: int, step: int
) -> None:
    """Before the first token it is looked for where there is patience, else in the first event alone."""
    if before and not patient:
        return
    wire = HEAD + chunked((before + fault("x" * length) + DONE).encode(), [len(before) or 10**6])
    relay = Relay(OURS, patient=patient)
    out = b"".join(relay.feed(wire[at : at + step], 0.0) for at in range(0, len(wire), step))
    assert (out, relay.refused, relay.status, relay.state) == (b"", True, 400, State.DONE)
    if length < ERROR_KEPT:
        assert json.loads(relay.refusal)["error"]["message"] == "x" * length


@pytest.mark.parametrize("patient", [False, True])
def test_an_error_behind_a_token_that_came_with_it_is_the_engines_whatever_its_code(
    patient: bool,
) -> None:
    """Nothing of it was shown, so another engine may answer; the client has nothing to mend."""
    with pytest.raises(UpstreamBroke, match="error event") as broke:
        Relay(OURS, patient=patient).feed(
            HEAD + chunked((delta("a") + fault("no") + DONE).encode(), []), 0.0
        )
    assert broke.value.kind == "engine_error"


def test_a_fault_that_ends_with_its_connection_says_what_it_is() -> None:
    relay = Relay(OURS)
    relay.feed(HEAD.replace(b"transfer-encoding: chunked\r\n", b"") + fault("no").encode(), 0.0)
    assert relay.eof() == b""
    assert json.loads(relay.refusal)["error"]["message"] == "no"


def test_a_refusal_in_plain_words_is_kept_whole_although_it_says_that_it_is_a_stream() -> None:
    body = b'{"error":{"message":"nope"}}'
    lines = (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
        % len(body)
    )
    relay = Relay(OURS)
    relay.feed(lines + body, 0.0)
    assert relay.refusal == body


@pytest.mark.parametrize("held", [b"", b"4"])
def test_a_stream_that_breaks_between_two_chunks_ends_with_an_error_event(held: bytes) -> None:
    relay = Relay(OURS)
    relay.feed(HEAD + chunked(delta("a").encode(), [])[:-5], 0.0)
    relay.feed(held, 0.0)
    with pytest.raises(UpstreamBroke, match="bad chunk size line"):
        relay.feed(b"zz\r\n", 0.0)
    assert b"stream_interrupted" in relay.break_off(Failure.UPSTREAM_FAILED, "gone")


def test_a_last_event_that_lacks_its_blank_line_is_not_told_yet() -> None:
    """Under an alias the client has nothing of it."""
    relay = Relay(OURS, None, False, Renamer("served", "my-alias"))
    relay.feed(
        HEAD + chunked(delta("a").encode(), [])[:-5] + chunked(b"data: [DONE]\n", [])[:-5], 0.0
    )
    assert b"stream_interrupted" in relay.break_off(Failure.UPSTREAM_FAILED, "gone")


@given(TEXTS, CUTS, st.sampled_from([None, "my-alias"]), st.booleans())
def test_events_may_end_in_crlf(
    texts: list[str], cuts: list[int], alias: str | None, http_1_0: bool
) -> None:
    payload = story(texts).replace("\n\n", "\r\n\r\n").encode()
    wire = HEAD + chunked(payload, [len(payload) // 3] * 2)
    seen = feed(wire, cuts, alias=alias, http_1_0=http_1_0)
    got = seen.out.partition(b"\r\n\r\n")[2] if http_1_0 else read(seen.out)[1]
    assert got == (
        payload.replace(b'"model":"served"', b'"model":"my-alias"') if alias else payload
    )
    assert (seen.usage, seen.events, seen.failed) == (Usage(17, 2, 16), len(texts) + 4, False)


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_of_events_cut_anywhere_the_last_one_alone_is_carried_on(end: str) -> None:
    events = f"data: a{end}data: b{end}".encode()
    assert [
        events[last_end(events[:cut]) :].strip() for cut in (len(events), len(events) // 2 + 3)
    ] == [
        b"",
        b"data: b",
    ]


def test_an_event_that_ends_in_crlf_is_shown_when_it_is_whole_under_an_alias_too() -> None:
    relay = Relay(OURS, None, False, Renamer("served", "my-alias"))
    events = [delta(text).replace("\n\n", "\r\n\r\n").encode() for text in "abc"]
    relay.feed(HEAD + chunked(events[0], [])[:-5], 0.0)
    shown = [relay.feed(chunked(event, [])[:-5], 0.0) for event in events[1:]]
    assert [text.count(b"my-alias") for text in shown] == [1, 1]
    assert relay.at_seam


@given(
    TEXTS,
    CUTS,
    st.sampled_from([b"\n", b": ping\n\n", b"\r\n"]),
    st.sampled_from(["\n\n", "\r\n\r\n"]),
)
def test_what_follows_the_last_event_makes_no_whole_answer_a_failed_one(
    texts: list[str], cuts: list[int], behind: bytes, end: str
) -> None:
    payload = story(texts).replace("\n\n", end).encode()
    seen = feed(
        HEAD + chunked(payload + behind, [len(payload)]), [*cuts, len(HEAD) + len(payload) + 12]
    )
    assert not seen.failed
    assert b"stream_interrupted" not in seen.out


@given(TEXTS, CUTS)
def test_headers_behind_the_last_chunk_go_no_further(texts: list[str], cuts: list[int]) -> None:
    wire = HEAD + chunked(story(texts).encode(), [50], b"x-secret: abc\r\n")
    assert feed(wire, cuts).out == feed(HEAD + chunked(story(texts).encode(), [50]), []).out


def test_nothing_is_added_to_a_stream_whose_chunk_the_client_has_in_part() -> None:
    """What broke it came in one read with the rest of that chunk, which is not shown."""
    events = delta("a").encode(), delta("b").encode()
    relay = Relay(OURS)
    whole = chunked(b"".join(events), [])[:-5]
    relay.feed(HEAD + whole[: len(whole) - len(events[1]) - 2], 0.0)
    with pytest.raises(UpstreamBroke, match="bad chunk size line"):
        relay.feed(whole[len(whole) - len(events[1]) - 2 :] + b"zz\r\n", 0.0)
    assert not relay.at_seam
    assert relay.break_off(Failure.UPSTREAM_FAILED, "gone") == b""


@given(CUTS, st.integers(0, 60_000), st.booleans())
def test_counts_are_found_however_much_stands_behind_them(
    cuts: list[int], more: int, between: bool
) -> None:
    """Log probabilities and ids of the prompt, which clients may ask for, come last."""
    ids = json.dumps({"prompt_token_ids": [7] * (more // 2)})[1:].encode()
    body = PLAIN[:-1] + b"," + ids
    if between:
        body = body.replace(b'"usage"', b'"prompt_logprobs":["%b"],"usage"' % (b"x" * more))
    wire = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
        + body
    )
    seen = feed(wire, [*(20 * cut for cut in cuts), len(wire) - 1])
    assert (seen.usage, seen.finish_reason) == (Usage(5, 7, None), "length")
    assert seen.out.endswith(body)


def test_a_connection_may_be_spoken_of_twice() -> None:
    lines = b"HTTP/1.1 200 OK\r\nconnection: x-a\r\nConnection: x-b , close\r\ncontent-length: 2\r\n\r\n{}"
    seen = feed(lines, [])
    assert (seen.state, seen.reusable) == (State.DONE, False)
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
def test_a_head_that_two_readers_could_read_differently_is_refused(head: bytes, kind: str) -> None:
    seen = feed(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + b"abc", [])
    assert (seen.broke, seen.out) == (kind, b"")


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
def test_chunks_that_make_no_sense_break_the_answer(body: bytes) -> None:
    good = chunked(ROLE.encode(), []).removesuffix(b"0\r\n\r\n")
    seen = feed(HEAD + good + body, [])
    assert seen.broke == "framing"
    _, _, whole = read(seen.out, strict=False)
    assert not whole or b"stream_interrupted" in seen.out


def test_an_endless_head_is_refused() -> None:
    relay = Relay(OURS)
    relay.feed(b"x-padding: " + b"a" * 65_000, 0.0)
    with pytest.raises(UpstreamBroke, match="too long"):
        relay.feed(b"a" * 1000, 0.0)


def test_a_refusal_without_a_body_by_its_status_ends_with_its_head() -> None:
    seen = feed(b"HTTP/1.1 304 x\r\ncontent-length: 5\r\n\r\n", [])
    assert (seen.state, seen.broke) == (State.DONE, None)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 x\r\n\r\n",
        b"HTTP/1.1 204 x\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ncontent-length: 0\r\n\r\n",
        HEAD + b"0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("alias", [None, "asked"])
def test_an_answer_without_a_byte_is_none_and_can_be_retried(
    answer: bytes, alias: str | None
) -> None:
    seen = feed(answer, [answer.index(b"\r\n\r\n") + 4], alias=alias)
    assert (seen.broke, seen.out, seen.firsts) == ("no_answer", b"", 0)


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
@pytest.mark.parametrize(
    "good", [b"", b"5\r\nhello\r\n", b"%x\r\n%b\r\n" % (len(ROLE), ROLE.encode())]
)
def test_what_breaks_in_the_read_that_it_begins_in_can_be_retried(kind: bytes, good: bytes) -> None:
    head = HEAD.replace(b"text/event-stream", kind)
    seen = feed(head + good + b"zz\r\n" + b"x" * FIRST_EVENT, [])
    assert (seen.broke, seen.out, seen.firsts) == ("framing", b"", 0)


def test_an_encoded_answer_is_not_passed_on_as_if_it_were_plain() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: %b\r\ncontent-length: 2\r\n\r\n"
    assert feed(head % b"gzip" + b"\x1f\x8b", []).broke == "framing"
    assert feed(head % b"identity" + b"{}", []).out.endswith(b"{}")
    assert feed((head % b"gzip").replace(b"200", b"400") + b"\x1f\x8b", []).broke is None


def test_a_close_before_the_first_byte_can_be_retried() -> None:
    seen = feed(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", [], eof=True)
    assert (seen.broke, seen.out) == ("truncated", b"")


@pytest.mark.parametrize("reads", [1, 2, 7])
def test_a_head_above_64_kib_is_refused_however_few_reads_it_comes_in(reads: int) -> None:
    wire = (
        HEAD[:-2]
        + b"".join(b"x-%d: %b\r\n" % (n, b"a" * 1000) for n in range(70))
        + b"\r\n"
        + b"5\r\ndata:\r\n"
    )
    relay = Relay(OURS)
    size = len(wire) // reads + 1
    for at in range(0, (reads - 1) * size, size):
        relay.feed(wire[at : at + size], 0.0)
    with pytest.raises(UpstreamBroke, match="head is too long"):
        relay.feed(wire[(reads - 1) * size :], 0.0)
    assert relay.head is None


@pytest.mark.parametrize("control", [b"\x00", b"\x01", b"\x0b", b"\x1b", b"\x7f"])
def test_control_bytes_in_a_content_type_go_no_further(control: bytes) -> None:
    relay = Relay(OURS)
    with pytest.raises(UpstreamBroke, match="control characters"):
        relay.feed(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/%bplain\r\ncontent-length: 2\r\n\r\nhi"
            % control,
            0.0,
        )


def test_many_interim_answers_are_read_past() -> None:
    relay = Relay(OURS)
    assert relay.feed(b"HTTP/1.1 103 \r\n\r\n" * 5000, 0.0) == b""
    assert relay.head is None
    relay.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", 0.0)
    assert relay.status == 0 or relay.committed


def test_nothing_is_added_inside_a_long_event_under_an_alias() -> None:
    """A part of it had to be shown, since so much is not held."""
    relay = Relay(OURS, None, False, Renamer("served", "my-alias"))
    relay.feed(
        HEAD + chunked(delta("a").encode() + b'data: {"long":"' + b"x" * 100_000, [])[:-5], 0.0
    )
    assert not relay.at_seam
    relay.feed(chunked(b'"}\n\n', [])[:-5], 0.0)
    assert relay.at_seam
