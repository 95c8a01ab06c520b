"""Tests of reading an image's dimensions from its first bytes."""

from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.request.image_size import (
    MAX_IMAGE_TOKENS,
    MIN_IMAGE_TOKENS,
    image_tokens,
    read_size,
)

SIDES = st.integers(1, 16_384)


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII5xI", 13, b"IHDR", width, height, 0)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(3)


def jpeg(width: int, height: int, before: bytes = b"") -> bytes:
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, height, width, 1) + bytes(3)
    return b"\xff\xd8" + before + frame + b"\xff\xda"


def segment(marker: int, length: int) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", length + 2) + b"\x7f" * length


def webp(kind: bytes, chunk: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(chunk)) + chunk
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_lossy(width: int, height: int) -> bytes:
    return webp(b"VP8 ", b"\x30\x01\x00\x9d\x01\x2a" + struct.pack("<HH", width, height | 0x4000))


def webp_lossless(width: int, height: int) -> bytes:
    return webp(b"VP8L", b"\x2f" + struct.pack("<I", width - 1 | height - 1 << 14) + bytes(8))


def webp_extended(width: int, height: int) -> bytes:
    sides = b"".join((side - 1).to_bytes(3, "little") for side in (width, height))
    return webp(b"VP8X", bytes(4) + sides)


FORMATS = [png, gif, jpeg, webp_lossless, webp_extended]


@pytest.mark.parametrize("form", FORMATS)
@given(SIDES, SIDES)
def test_each_format_has_its_dimensions(form, width: int, height: int) -> None:  # type: ignore[no-untyped-def]
    assert read_size(form(width, height)) == (width, height)


@given(st.integers(1, 16_383), st.integers(1, 16_383))
def test_a_lossy_webp_has_scaling_beside_its_dimensions(width: int, height: int) -> None:
    assert read_size(webp_lossy(width, height)) == (width, height)


@pytest.mark.parametrize(
    "before",
    [
        segment(0xE0, 14),
        segment(0xE1, 60_000) + segment(0xE2, 60_000),
        segment(0xC4, 100) + b"\xff\xff",  # fill bytes before the marker
        b"\xff\x01" + segment(0xDB, 65),
    ],
)
def test_a_jpeg_may_have_other_segments_before_its_frame(before: bytes) -> None:
    data = jpeg(640, 480, before)
    assert read_size(data) == (640, 480)
    assert image_tokens(memoryview(base64.b64encode(data))) == 23 * 18


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"plain text that is long enough to be something else",
        png(0, 10),
        gif(10, 0),
        png(10, 10)[:20],
        webp(b"VP8 ", bytes(20)),
        webp(b"ABCD", bytes(20)),
        b"\xff\xd8\xff\xe1\x00\x00" + bytes(100),
        b"\xff\xd8" + segment(0xE1, 60_000) * 4,
        b"\xff\xd8" + bytes(300_000),
    ],
)
def test_other_data_has_no_dimensions(data: bytes) -> None:
    assert read_size(data) is None
    assert image_tokens(memoryview(base64.b64encode(data))) is None


@pytest.mark.parametrize("text", [b"A", b"AAAAA", b"=====", b"%%%%", b"QUFB" * 20_000])
def test_invalid_base64_is_no_image(text: bytes) -> None:
    assert image_tokens(memoryview(text)) is None


@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    for start in (
        b"",
        b"\xff\xd8",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF0000WEBP",
        b"RIFF0000WEBPVP8L",
    ):
        size = read_size(start + data)
        assert size is None or all(size)
        tokens = image_tokens(memoryview(base64.b64encode(start + data)))
        assert tokens is None or MIN_IMAGE_TOKENS <= tokens <= MAX_IMAGE_TOKENS
