"""Tests of responses rewritten while streaming: equal bytes however they are split, and little
buffering.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol import token_ledger
from gateway.protocol.relay import UpstreamError
from gateway.protocol.resume_terms import ContinuationTerms
from gateway.protocol.rewrite import (
    MAX_HELD_EVENT,
    CachedTokensRewriter,
    ModelNameRewriter,
    whole_events_length,
)
from gateway.protocol.token_ledger import MAX_EVENT_BYTES, Ledger, LedgerRecorder
from tests.replaced import stand_in

PARTS = st.lists(
    st.sampled_from(
        [
            b'{"model":"served"',
            b'"model": \n "served"',
            b'"model":"other"',
            b'"cached_tokens": 17',
            b'"cached_tokens":4',
            b"5",
            b'\\"model\\":\\"served\\"',
            b'"model',
            b"\n\n",
            b"\r\n\r\n",
            b"x" * 300,
            b"x" * MAX_HELD_EVENT,
        ]
    ),
    max_size=12,
)


def in_pieces(renamer: ModelNameRewriter, text: bytes, cuts: list[int], *, sse: bool) -> bytes:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    out = [renamer.feed(text[a:b], is_sse=sse, is_complete=False) for a, b in pairwise(ends)]
    return b"".join([*out, renamer.feed(b"", is_sse=sse, is_complete=True)])


@given(PARTS, st.lists(st.integers(0, 10**6), max_size=8), st.booleans())
def test_a_response_is_rewritten_the_same_however_it_is_cut(
    parts: list[bytes], cuts: list[int], sse: bool
) -> None:
    text = b"".join(parts)
    named = re.sub(rb'("model":\s*)"served"', rb'\1"mine"', text)
    counted = re.sub(rb'("cached_tokens":\s*)\d+', rb"\g<1>999", named)
    assert in_pieces(ModelNameRewriter("served", "mine"), text, cuts, sse=sse) == named
    corrector = CachedTokensRewriter("served", "mine")
    corrector.cached_tokens = 999
    assert in_pieces(corrector, text, cuts, sse=sse) == counted


@pytest.mark.parametrize("sse", [False, True])
def test_little_of_a_long_response_is_held(sse: bool) -> None:
    # Buffering all of it, and copying it on every read, would block the event loop for seconds.
    renamer, piece, out = ModelNameRewriter("served", "mine"), b"x" * 50_000, 0
    out += len(renamer.feed(b'data: {"model":"served",', is_sse=sse, is_complete=False))
    for _ in range(100):
        out += len(renamer.feed(piece, is_sse=sse, is_complete=False))
        assert len(renamer._pending) <= MAX_HELD_EVENT
    assert out > 100 * len(piece) - MAX_HELD_EVENT
    assert renamer.is_mid_event is sse
    renamer.feed(b"}\n\n", is_sse=sse, is_complete=False)
    assert not renamer.is_mid_event


def test_whole_events_are_released_and_a_partial_one_is_held() -> None:
    renamer = ModelNameRewriter("served", "mine")
    assert renamer.feed(
        b'data: {"model":"served"}\n\ndata: {"mod', is_sse=True, is_complete=False
    ) == (b'data: {"model":"mine"}\n\n')
    assert not renamer.is_mid_event
    assert renamer.feed(b'el":"served"}\r', is_sse=True, is_complete=False) == b""
    assert (
        renamer.feed(b"\n\r\n", is_sse=True, is_complete=False) == b'data: {"model":"mine"}\r\n\r\n'
    )


class CountingLedger:
    obstacle = ""
    is_done = False

    def __init__(self) -> None:
        self.terms: ContinuationTerms | None = None
        self.back = 0

    def mark(self) -> None: ...

    def rewind(self) -> None:
        self.back += 1


def recorder() -> LedgerRecorder:
    return LedgerRecorder(
        stand_in(Ledger, CountingLedger()),
        lambda chunk: b"%d " % len(chunk["a"]),
        "served",
        "mine",
    )


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.lists(st.integers(0, 10**6), max_size=8),
)
def test_a_recorder_sees_whole_events_however_they_are_cut(
    sizes: list[int], cuts: list[int]
) -> None:
    for end in (b"\n\n", b"\r\n\r\n"):
        text = b"".join(b'data: {"a":"%b"}%b' % (b"x" * size, end) for size in sizes)
        assert in_pieces(recorder(), text, cuts, sse=True) == b"".join(
            b"%d " % size for size in sizes
        )


def test_a_recorder_joins_the_pieces_of_a_long_event_once() -> None:
    rewriter, pieces = recorder(), [b'data: {"a":"', *[b"x" * 10_000] * 500, b'"}\n', b"\n"]
    for piece in pieces[:-1]:
        assert rewriter.feed(piece, is_sse=True, is_complete=False) == b""
        assert all(len(piece) <= 10_000 for piece in rewriter._unfinished)
    assert rewriter.feed(pieces[-1], is_sse=True, is_complete=False) == b"5000000 "
    assert not rewriter._unfinished


@pytest.mark.parametrize("piece_bytes", [1_000, 64_000])
def test_a_recorder_searches_each_byte_of_a_long_event_once(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    def count_searched(text: bytes) -> int:
        searched.append(len(text))
        return whole_events_length(text)

    monkeypatch.setattr(token_ledger, "whole_events_length", count_searched)
    rewriter, reads = recorder(), 4_000_000 // piece_bytes
    for _ in range(reads):
        rewriter.feed(b"x" * piece_bytes, is_sse=True, is_complete=False)
    assert len(searched) == reads
    assert max(searched) <= piece_bytes + 2  # the end of an event may be cut by a read


def test_an_event_that_is_too_long_to_record_breaks_the_response() -> None:
    rewriter = recorder()
    for _ in range(MAX_EVENT_BYTES // 100_000):
        rewriter.feed(b"x" * 100_000, is_sse=True, is_complete=False)
    with pytest.raises(UpstreamError, match="event of more than"):
        rewriter.feed(b"x" * 100_000, is_sse=True, is_complete=False)
