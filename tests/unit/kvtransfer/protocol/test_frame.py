"""Tests that frames, the units of bytes between KV agents, are decoded as they were encoded.

All other bytes are refused.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.frame import (
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    WINDOW_HEADER_BYTES,
    FrameError,
    FrameKind,
    FrameLimits,
    PayloadProof,
    decode_header,
    decode_trailer,
    encode_frame,
    encode_trailer,
    encode_window_frame,
    pack_head,
    unpack_head,
    verify_header,
)
from kvtransfer.transport_interface import WindowHead, WindowVerdict

LIMITS = FrameLimits(header_bytes=1000, payload_bytes=1 << 20)
HEAD = WindowHead(1 << 61, 3, 2, 1000, 64, 1 << 22)
u32 = st.integers(0, (1 << 32) - 1)


def read(data: bytes, limits: FrameLimits = LIMITS) -> tuple[FrameKind, bytes, int]:
    view = memoryview(data)
    announced = decode_header(view, limits)
    size = PREAMBLE_BYTES + announced.header_bytes
    verify_header(view[:size], announced)
    return announced.kind, data[PREAMBLE_BYTES:size], announced.payload_bytes


@given(st.sampled_from(FrameKind), st.binary(max_size=1000), st.integers(0, 1 << 20))
def test_what_was_framed_is_read_back(kind: FrameKind, header: bytes, payload_bytes: int) -> None:
    assert read(encode_frame(kind, header, payload_bytes)) == (kind, header, payload_bytes)


@given(st.binary(max_size=100), st.data())
def test_a_single_altered_byte_is_detected(header: bytes, data: st.DataObject) -> None:
    whole = bytearray(encode_frame(FrameKind.WINDOW, header, 77, PayloadProof.XXH3))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        read(bytes(whole))


@given(st.binary(min_size=PREAMBLE_BYTES, max_size=200))
def test_noise_is_no_frame(noise: bytes) -> None:
    with pytest.raises(FrameError):
        read(noise)


def test_a_header_or_payload_over_the_limit_is_refused_by_its_preamble_alone() -> None:
    for data in (
        encode_frame(FrameKind.MESSAGE, bytes(1001)),
        encode_frame(FrameKind.WINDOW, b"", (1 << 20) + 1),
    ):
        with pytest.raises(FrameError, match="exceeds the limit"):
            decode_header(memoryview(data[:PREAMBLE_BYTES]), LIMITS)


@given(st.integers(0, (1 << 62) - 1), u32, u32, u32, u32, st.integers(0, 1 << 48))
def test_a_window_head_decodes_to_the_same(
    transfer: int, group: int, pair: int, first: int, count: int, size: int
) -> None:
    head = WindowHead(transfer, group, pair, first, count, size)
    assert len(pack_head(head)) == WINDOW_HEADER_BYTES
    assert unpack_head(pack_head(head)) == head


def test_a_windows_frame_is_its_head_in_a_frame() -> None:
    assert encode_window_frame(HEAD, 9, PayloadProof.XXH3) == encode_frame(
        FrameKind.WINDOW, pack_head(HEAD), 9, PayloadProof.XXH3
    )
    with pytest.raises(FrameError, match="cannot be encoded"):
        encode_window_frame(HEAD, -1, PayloadProof.NONE)


def test_a_head_that_does_not_fit_or_is_too_short_is_an_error() -> None:
    with pytest.raises(FrameError, match="cannot be encoded"):
        pack_head(WindowHead(-1, 0, 0, 0, 0, 0))
    with pytest.raises(FrameError, match="is too short"):
        unpack_head(pack_head(HEAD)[:-1])


@pytest.mark.parametrize("verdict", WindowVerdict)
def test_a_trailer_carries_verdict_and_proof(verdict: WindowVerdict) -> None:
    assert len(encode_trailer(verdict, 99)) == TRAILER_BYTES
    assert decode_trailer(memoryview(encode_trailer(verdict, 99))) == (
        verdict,
        (99).to_bytes(16, "little"),
    )
    assert decode_trailer(memoryview(encode_trailer(verdict, b"t" * 16))) == (verdict, b"t" * 16)


def test_an_unknown_verdict_is_an_error() -> None:
    with pytest.raises(FrameError, match="verdict"):
        decode_trailer(memoryview(b"\x07" + bytes(TRAILER_BYTES - 1)))
