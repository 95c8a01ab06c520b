"""Events forwarded by an event template have the same effects as parsed events."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics.metric_types import Histogram
from gateway.protocol.event_template import Likeness, likeness
from gateway.protocol.relay import Relay, State, UpstreamBroke
from gateway.protocol.response_framing import ChunkedBody
from gateway.protocol.rewrite import Renamer
from tests.replaced import replace_method

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STARTS = (
    b'data: {"id":"c1","model":"served","choices":[{"index":0,"delta":{"content":"',
    b'data: {"usage":{"prompt_tokens":3},"choices":[{"text":"',
    b'data: {"error":{"content":"',
    b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments": "',
)
ENDS = (
    b'"},"finish_reason":null}]}\n\n',
    b'"}}],"usage":{"prompt_tokens":17,"completion_tokens":2}}\n\n',
    b'"},"finish_reason":"stop"}]}\n\n',
    b'":1}\n\n',
    b'"}\n\ndata: {"error":1}\n\n',
    b'"}\n',
)
WORDS = (
    b"usage",
    b"error",
    b"finish_reason",
    b'"',
    b'\\"',
    b"\n",
    b"\n\n",
    b"data:",
    b"\ndata: ",
    b":",
    b"{",
    b"a",
    b"5",
)
TEXTS = st.lists(st.sampled_from(WORDS), max_size=4).map(b"".join)
EVENTS = st.one_of(
    st.builds(
        lambda start, text, end: start + text + end,
        st.sampled_from(STARTS),
        TEXTS,
        st.sampled_from(ENDS),
    ),
    st.sampled_from([b"data: [DONE]\n\n", b": ping\n\n", b"data: {"]),
)
USUAL = STARTS[0] + b"hello" + ENDS[0]


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def effects_of(relay: Relay, pieces: list[bytes]) -> list[object]:
    """Feed a relay piece by piece. Returns its outputs and counters after each piece and at the end."""
    observed: list[object] = []
    try:
        for now, piece in enumerate(pieces):
            if relay.state is not State.DONE:
                observed += [
                    relay.feed(piece, float(now)),
                    relay.events,
                    relay.bytes_out,
                    relay.last_at,
                    relay.at_seam,
                ]
    except UpstreamBroke as error:
        observed.append(error.kind)
    return [
        *observed,
        relay.first_token_at,
        relay.usage,
        relay.finish_reason,
        relay.failed_in_stream,
        relay.state,
    ]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "as it came": dict,
    "for HTTP/1.0": lambda: {"http_1_0": True},
    "under an alias": lambda: {"renamer": Renamer("served", "mine")},
}


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(EVENTS, max_size=12), st.lists(st.integers(0, 3000), max_size=6), st.booleans())
def test_a_relay_has_the_same_effects_with_and_without_event_templates(
    kind: str, events: list[bytes], cuts: list[int], ended: bool
) -> None:
    """Each event is one chunk and one read, with a few cuts anywhere. A relay with `gaps` parses all."""
    pieces = [
        HEAD + chunk(USUAL),
        *(chunk(event) for event in events),
        b"0\r\n\r\n" if ended else b"",
    ]
    wire = b"".join(pieces)
    edges = sorted(
        {
            *itertools.accumulate(len(piece) for piece in pieces),
            *(min(cut, len(wire)) for cut in cuts),
            0,
        }
    )
    read = [wire[a:b] for a, b in itertools.pairwise(edges)]
    parsing = Relay(b"", gaps=Histogram((1.0,)), **KINDS[kind]())
    assert effects_of(Relay(b"", **KINDS[kind]()), read) == effects_of(parsing, read)


@pytest.mark.parametrize("kind", KINDS)
def test_only_events_forwarded_unchanged_are_forwarded_unparsed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[bool] = []
    unwatched = Likeness.fits

    def watched(like: Likeness, data: bytes) -> bool:
        passed.append(unwatched(like, data))
        return passed[-1]

    replace_method(monkeypatch, Likeness, "fits", watched)
    effects_of(Relay(b"", **KINDS[kind]()), [HEAD + chunk(USUAL), *[chunk(USUAL)] * 20])
    assert sum(passed) == (20 if kind == "as it came" else 0)


def fits(first: bytes, second: bytes) -> bool:
    """Return whether the second chunk matches a template made from the first."""
    body = ChunkedBody()
    like = likeness(body, first, body.feed(first))
    return like is not None and like.fits(second)


@pytest.mark.parametrize("start", [STARTS[0], STARTS[3]])
def test_events_that_differ_only_in_their_text_match(start: bytes) -> None:
    assert fits(chunk(start + b"a" + ENDS[0]), chunk(start + b" longer, and \\n more" + ENDS[0]))
    assert fits(chunk(start + b"longer" + ENDS[0]), chunk(start + ENDS[0]))


@pytest.mark.parametrize(
    "other",
    [
        chunk(STARTS[0] + b"a" + ENDS[2]),
        chunk(STARTS[1] + b"a" + ENDS[0]),
        chunk(STARTS[0] + b'a"b' + ENDS[0]),
        chunk(STARTS[0] + b"a\n" + ENDS[0]),
        chunk(USUAL) + chunk(USUAL),
        chunk(USUAL)[:-1],
        USUAL,
        b"",
    ],
)
def test_other_chunks_do_not_match(other: bytes) -> None:
    assert not fits(chunk(USUAL), other)


@pytest.mark.parametrize(
    "event",
    [
        b"data: [DONE]\n\n",
        STARTS[0] + ENDS[0],
        STARTS[0] + b'a\\"b' + ENDS[0],
        STARTS[0] + b"a" + ENDS[3],
        STARTS[0] + b"a" + ENDS[4],
        b": a comment\n" + USUAL,
    ],
)
def test_an_event_without_plain_text_makes_no_template(event: bytes) -> None:
    assert not fits(chunk(event), chunk(event))


def test_nothing_matches_inside_a_chunk() -> None:
    """Bytes that look like a chunk may be the payload of a larger chunk."""
    body = ChunkedBody()
    like = likeness(body, chunk(USUAL), body.feed(chunk(USUAL)))
    assert like is not None
    body.feed(b"1000\r\n")
    assert not like.fits(chunk(USUAL))
