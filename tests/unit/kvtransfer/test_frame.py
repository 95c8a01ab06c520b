"""Frames: every cutting gives the same frames; damage, lies and excess are refused."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.frame import Frame, FrameDecoder, FrameError, FrameLimits, encode

LIMITS = FrameLimits(header_bytes=2048, payload_bytes=4096)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
frames = st.builds(Frame, st.dictionaries(st.text(max_size=8), values, max_size=4), st.binary(max_size=300))


def wire(*some: Frame) -> bytes:
    return b"".join(b"".join(encode(frame, LIMITS)) for frame in some)


@given(st.lists(frames, max_size=4), st.lists(st.integers(0, 3000), max_size=6))
def test_frames_survive_the_wire_in_every_cutting(sent: list[Frame], cuts: list[int]) -> None:
    data, decoder, received = wire(*sent), FrameDecoder(LIMITS), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        received += decoder.feed(data[start:end])
    decoder.end()
    assert received == sent


@given(frames)
def test_frames_survive_byte_by_byte(frame: Frame) -> None:
    decoder = FrameDecoder(LIMITS)
    assert [one for byte in wire(frame) for one in decoder.feed(bytes([byte]))] == [frame]


@given(st.binary(max_size=200))
def test_noise_is_refused_or_waited_for_but_nothing_else_is_raised(noise: bytes) -> None:
    decoder = FrameDecoder(LIMITS)
    try:
        assert decoder.feed(noise) == []
    except FrameError:
        assert not b"KVF1".startswith(noise[:4]) or len(noise) >= 24


@given(frames, st.data())
def test_one_turned_bit_never_yields_a_frame(frame: Frame, data: st.DataObject) -> None:
    bits = bytearray(wire(frame))
    place = data.draw(st.integers(0, len(bits) * 8 - 1))
    bits[place // 8] ^= 1 << place % 8
    decoder = FrameDecoder(LIMITS)
    try:
        received = decoder.feed(bytes(bits))
        assert received == []
        with pytest.raises(FrameError):
            decoder.end()
    except FrameError:
        pass


@pytest.mark.parametrize("frame", [Frame({"a": "x" * 3000}), Frame({}, bytes(5000))])
def test_a_frame_over_the_limit_is_refused_on_both_sides_before_it_is_held(frame: Frame) -> None:
    with pytest.raises(FrameError, match="over the limit"):
        encode(frame, LIMITS)
    large = encode(frame, FrameLimits())[0][:24]
    with pytest.raises(FrameError, match="over the limit"):
        FrameDecoder(LIMITS).feed(large)


def test_a_stream_that_ends_within_a_frame_is_an_error() -> None:
    decoder = FrameDecoder(LIMITS)
    decoder.feed(wire(Frame({"op": "offer"}))[:-1])
    with pytest.raises(FrameError, match="bytes into a frame"):
        decoder.end()


def test_wrong_magic_is_refused_at_the_first_wrong_byte() -> None:
    with pytest.raises(FrameError, match="wrong magic"):
        FrameDecoder(LIMITS).feed(b"KVX")


@pytest.mark.parametrize("header", [[1, 2], {1: 2}, "text", {b"raw": 1}])
def test_a_header_that_is_no_map_of_names_is_refused(header: object, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = msgspec.msgpack.encode(header)
    monkeypatch.setattr("kvtransfer.frame.msgspec.msgpack.encode", lambda *_, **__: packed)
    data = wire(Frame({}))
    with pytest.raises(FrameError, match="no map"):
        FrameDecoder(LIMITS).feed(data)


def test_a_header_nested_beyond_reason_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvtransfer.frame.msgspec.msgpack.encode", lambda *_, **__: b"\x81\xa1a" + b"\x91" * 1900 + b"\x01"
    )
    data = wire(Frame({}))
    with pytest.raises(FrameError, match="no map"):
        FrameDecoder(LIMITS).feed(data)
