"""Reads an image's dimensions from its first bytes, and estimates its number of tokens.

Supports PNG, JPEG, GIF and WebP; only headers are decoded. Each engine scales images in its own
way. Therefore policies/admission/prompt_length_correction.py learns a ratio per model, which
corrects the estimates.
"""

from __future__ import annotations

import binascii

PIXELS_PER_SIDE = 28
"""Side in pixels of the square of an image that becomes one token.

Qwen2-VL and its successors merge 2 x 2 patches of 14 pixels each. An image of 280 x 280 pixels
therefore takes 100 tokens.
"""
MIN_IMAGE_TOKENS, MAX_IMAGE_TOKENS = 64, 4096
"""Bounds of the estimated tokens of one image. By default, engines scale smaller images up and
larger ones down to about these limits."""

# Base64 characters to decode, in turn: a JPEG may have a thumbnail before its dimensions.
_SLICES = (64, 4 * 1024, 256 * 1024)
_PNG = b"\x89PNG\r\n\x1a\n"
_NO_LENGTH = frozenset((0x01, *range(0xD0, 0xD8)))  # JPEG markers without a segment
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG segments with dimensions

Size = tuple[int, int]


def image_tokens(base64_text: memoryview) -> int | None:
    """Return the estimated number of tokens of a base64 image; None if its format is unknown."""
    for length in _SLICES:
        try:
            data = binascii.a2b_base64(base64_text[:length])
        except binascii.Error:
            return None
        size = read_size(data)
        if size is not None:
            return _tokens(*size)
        # Only a JPEG may have its dimensions later in the file.
        if not data.startswith(b"\xff\xd8"):
            return None
    return None


def read_size(data: bytes) -> Size | None:
    """Return the width and height of an image in pixels; None if `data` does not contain them."""
    if data.startswith(_PNG) and data[12:16] == b"IHDR" and len(data) >= 24:
        size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    elif data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        size = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP" and len(data) >= 30:
        size = _webp_size(data)
    elif data.startswith(b"\xff\xd8"):
        size = _jpeg_size(data)
    else:
        return None
    return size if all(size) else None


def _webp_size(data: bytes) -> Size:
    # Return the width and height in the first chunk of a WebP file, or zeros if it has none.
    kind = data[12:16]
    # With animation, alpha or metadata, each length has 24 bits, and is stored minus 1.
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    # A lossless image stores each length in 14 bits, minus 1.
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    # A lossy image stores each length in 14 bits, and 2 bits for scaling.
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = data[26:28], data[28:30]
        return int.from_bytes(width, "little") & 0x3FFF, int.from_bytes(height, "little") & 0x3FFF
    return 0, 0


def _jpeg_size(data: bytes) -> Size:
    # Return the width and height in the first frame of a JPEG file, or zeros if it has none.
    offset = 2
    while offset + 9 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker == 0xFF:  # fill bytes may precede a marker
            offset += 1
        elif marker in _FRAMES:
            height, width = data[offset + 5 : offset + 7], data[offset + 7 : offset + 9]
            return int.from_bytes(width, "big"), int.from_bytes(height, "big")
        elif marker in _NO_LENGTH:
            offset += 2
        else:
            length = int.from_bytes(data[offset + 2 : offset + 4], "big")
            if length < 2:
                break
            offset += 2 + length
    return 0, 0


def _tokens(width: int, height: int) -> int:
    columns, rows = -(-width // PIXELS_PER_SIDE), -(-height // PIXELS_PER_SIDE)
    return max(MIN_IMAGE_TOKENS, min(MAX_IMAGE_TOKENS, columns * rows))
