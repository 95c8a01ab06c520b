"""Tests of responses that are changed while they are streamed, however their bytes are split."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.response import long_event, token_ledger
from gateway.protocol.response.long_event import (
    LONG_EVENT,
    MAX_DECODED_BYTES,
    MAX_EVENT_BYTES,
    first_event_length,
)
from gateway.protocol.response.model_and_usage_rewrite import (
    ANY_NAME,
    MAX_HELD_EVENT,
    CachedTokensRewriter,
    ModelNameRewriter,
    versioned_name,
    whole_events_length,
)
from gateway.protocol.response.relay import UpstreamError
from gateway.protocol.response.resume_eligibility import ContinuationTerms
from gateway.protocol.response.token_ledger import Ledger, LedgerRecorder
from tests.replacement import stand_in

PARTS = st.lists(
    st.sampled_from(
        [
            b'{"model":"served"',
            b'"model": \n "served"',
            b'"model":"other"',
            b'"model":"served-2024-07-18"',
            b'"model":"an \\"other\\" name"',
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
    renamer = ModelNameRewriter("served", "mine", versioned_name("served"))
    dated = named.replace(b'"served-2024-07-18"', b'"mine"')
    assert in_pieces(renamer, text, cuts, sse=sse) == dated
    renamer = ModelNameRewriter("served", "mine", ANY_NAME)
    every = re.sub(rb'("model":\s*)"(?:[^"\\]|\\.)+"', rb'\1"mine"', text)
    assert in_pieces(renamer, text, cuts, sse=sse) == every


@pytest.mark.parametrize(
    ("name", "is_same"),
    [
        ("gpt-4o-mini", True),
        ("gpt-4o-mini-2024-07-18", True),
        ("gpt-4o-mini@20240718", True),
        ("gpt-4o", False),
        ("gpt-4o-miniature", False),
    ],
)
def test_a_name_with_a_version_is_replaced_and_another_name_is_not(
    name: str, is_same: bool
) -> None:
    renamer = ModelNameRewriter("gpt-4o-mini", "mine", versioned_name("gpt-4o-mini"))
    text = b'{"model": "%b"}' % name.encode()
    found = renamer.feed(text, is_sse=False, is_complete=True)
    assert found == (b'{"model": "mine"}' if is_same else text)


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
    max_tokens = 10**6

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


IDS = '"prompt_token_ids":[%s]'


def events_with_ids(number: int, content: str = "a") -> bytes:
    # Return three events, the second of which lists `number` ids.
    ids = ",".join(str(id_) for id_ in range(number))
    return (
        b'data: {"a":"1"}\n\n'
        + f'data: {{{IDS % ids},"a":"{content}","choices":[{{"token_ids":[{ids}]}}]}}\n\n'.encode()
        + b'data: {"a":"3"}\n\n'
    )


def recording(shown: list[dict[str, Any]]) -> LedgerRecorder:
    def show(chunk: dict[str, Any]) -> bytes:
        shown.append(chunk)
        return b"."

    return LedgerRecorder(stand_in(Ledger, CountingLedger()), show, "served", "mine")


@given(
    st.integers(0, 60),
    st.integers(0, 40),
    st.lists(st.integers(0, 10**6), max_size=12),
    st.booleans(),
)
def test_a_long_event_is_recorded_like_a_short_one_however_it_is_cut(
    number: int, padding: int, cuts: list[int], crlf: bool
) -> None:
    text = events_with_ids(number, "x" * padding)
    if crlf:
        text = text.replace(b"\n", b"\r\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_ledger, "LONG_EVENT", 30)
        patch.setattr(long_event, "_SLICE", 10)
        shown: list[dict[str, Any]] = []
        assert in_pieces(recording(shown), text, cuts, sse=True) == b"..."
    ids = list(range(number))
    assert [chunk["a"] for chunk in shown] == ["1", "x" * padding, "3"]
    assert list(shown[1]["prompt_token_ids"]) == ids
    assert list(shown[1]["choices"][0]["token_ids"]) == ids


def test_a_recorder_decodes_a_long_event_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Decoding it at once would block the event loop for tens of milliseconds.
    decoded: list[int] = []

    def count_decoded(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def counting(text: bytes) -> Any:
            decoded.append(len(text))
            return decode(text)

        return counting

    monkeypatch.setattr(token_ledger, "_decode", count_decoded(token_ledger._decode))
    monkeypatch.setattr(long_event, "_decode_ids", count_decoded(long_event._decode_ids))
    shown: list[dict[str, Any]] = []
    rewriter, text = recording(shown), events_with_ids(500_000)
    assert 5_000_000 < len(text) < MAX_EVENT_BYTES
    for start in range(0, len(text), 256_000):
        rewriter.feed(text[start : start + 256_000], is_sse=True, is_complete=False)
    assert len(shown[1]["prompt_token_ids"]) == 500_000
    assert max(decoded) <= 64 * 1024 + 100
    assert sum(decoded) <= 1.01 * len(text)


def test_of_more_ids_than_a_ledger_keeps_only_the_number_is_recorded() -> None:
    shown: list[dict[str, Any]] = []
    rewriter = recording(shown)
    rewriter.ledger.max_tokens = 1000
    text = events_with_ids(50_000)
    for start in range(0, len(text), 10_000):
        rewriter.feed(text[start : start + 10_000], is_sse=True, is_complete=False)
    assert shown[1]["prompt_token_ids"] == range(50_000)


@pytest.mark.parametrize("piece_bytes", [1_000, 64_000])
def test_a_recorder_searches_each_byte_of_a_long_event_once(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    def count_searched(search: Callable[[bytes], int]) -> Callable[[bytes], int]:
        def counting(text: bytes) -> int:
            searched.append(len(text))
            return search(text)

        return counting

    for search in (whole_events_length, first_event_length):
        monkeypatch.setattr(token_ledger, search.__name__, count_searched(search))
    rewriter, reads = recorder(), 4_000_000 // piece_bytes
    rewriter.feed(b'data: {"token_ids": [1', is_sse=True, is_complete=False)
    for _ in range(reads):
        rewriter.feed(b",2345678" * (piece_bytes // 8), is_sse=True, is_complete=False)
    assert len(searched) == reads + 1
    assert max(searched) <= piece_bytes + 2  # the end of an event may be cut by a read


@pytest.mark.parametrize(
    ("begin", "more", "limit"),
    [(b"{", b"x", MAX_DECODED_BYTES), (b'{"token_ids":[1', b",2345678", MAX_EVENT_BYTES)],
)
def test_an_event_that_is_too_long_to_record_breaks_the_response(
    begin: bytes, more: bytes, limit: int
) -> None:
    rewriter, piece = recorder(), more * (LONG_EVENT // len(more))
    rewriter.feed(b"data: " + begin, is_sse=True, is_complete=False)
    for _ in range(limit // len(piece) - 1):
        rewriter.feed(piece, is_sse=True, is_complete=False)
    with pytest.raises(UpstreamError, match=f"event of more than {limit}"):
        rewriter.feed(piece * 2, is_sse=True, is_complete=False)


@pytest.mark.parametrize("ids", [b'"one"', b"1,,2", b"[1]", b"-1", b"4294967296", b"1" * 100])
def test_a_long_list_of_anything_but_token_ids_breaks_the_response(
    ids: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ledger, "LONG_EVENT", 10)
    rewriter = recording([])
    event = b'data: {"choices":[{"token_ids":[' + ids + b"]}]}\n\n"
    with pytest.raises(UpstreamError):
        in_pieces(rewriter, event, list(range(len(event))), sse=True)
