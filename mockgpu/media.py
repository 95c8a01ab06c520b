"""Converts images, audio and files in messages to a fixed number of tokens each.

Real engines count the tokens of a medium by its size or duration. Here each medium has
MEDIUM_TOKENS tokens, which depend on its content. So the same image has the same tokens again, and
its KV is found in the prefix cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

MEDIUM_TOKENS = 900
_MEDIUM = re.compile(r"(?:data:[^,]{0,200},)?[A-Za-z0-9+/=_-]{1024,}")
# Characters that must match. To match an image of 3 MB would hold up the engine for 16 ms.
_MATCHED = 4096
_DIGEST_TOKENS = 4  # number of tokens in a digest, of four bytes each


def render_medium(part: object) -> bytes | None:
    """Return MEDIUM_TOKENS tokens for each medium in a content part.

    Returns None if the part has no base64 media.
    """
    if not isinstance(part, dict) or part.get("type") == "text":
        return None
    digests = [xxh3_128_digest(text.encode()) for text in _strings(part) if _is_medium(text)]
    return b"".join(digest * (MEDIUM_TOKENS // _DIGEST_TOKENS) for digest in digests) or None


def render_parts(parts: list[Any]) -> list[bytes] | None:
    """Convert a message's content parts to prompt bytes; None if no part is a medium.

    Text parts are not padded to whole tokens here. Media fill whole tokens already.
    """
    media = [render_medium(part) for part in parts]
    if not any(media):
        return None
    return [medium or _other_part(part) for medium, part in zip(media, parts, strict=True)]


def _is_medium(text: str) -> bool:
    is_base64 = _MEDIUM.fullmatch(text, 0, _MATCHED) is not None
    return is_base64 and text.isascii() and text.find(" ", _MATCHED) < 0


def _other_part(part: object) -> bytes:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return (
        text.encode("utf-8", "surrogatepass")
        if isinstance(text, str)
        else msgspec.json.encode(part)
    )


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
