"""Caches what the members of a chat request say apart from its conversation (its shape).

No I/O. No I/O.

Most requests of an application differ in nothing but their conversation. The bytes before and after
the conversation's value are the key of the cache, so a request with a known shape needs no parsing
of its other members. Only compact bodies are cached, as SDKs send them.

Why equal bytes around the conversation mean equal members. A cached suffix has been parsed at depth
1 of its body: it has an even number of quotes, ends the object, and has no second conversation. If
another body is valid JSON and ends with these bytes, they cannot begin inside one of its strings,
since the body would then end inside a string. They cannot begin at another depth, since the body
would not end at depth 0. So they hold the same members there. Between prefix and suffix lie as many
bytes as the decoder's value of the conversation has, so that value is all that lies there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

MAX_SHAPES = 512
"""When the cache is full it is emptied: what is in use returns with the next requests."""
MAX_SHAPE_BYTES = 1024
"""The most bytes beside the conversation: hashing more takes as long as parsing them."""
MAX_PREFIX_BYTES = 256

CONVERSATION = "messages"
_NAME = b'"messages":'

ShapeKey = tuple[bytes, bytes]
"""The body's bytes up to the first one of the conversation's value, and those after the value."""

ShapeT = TypeVar("ShapeT")


def shape_key(body: bytes, members: Mapping[str, msgspec.Raw]) -> ShapeKey | None:
    """Return the cache key of a decoded chat request, or None if its shape cannot be cached."""
    conversation = members.get(CONVERSATION)
    name = body.find(_NAME, 0, MAX_PREFIX_BYTES)
    if conversation is None or name < 0:
        return None
    start = name + len(_NAME)
    length = len(conversation)
    if len(body) - length > MAX_SHAPE_BYTES:
        return None
    return body[: start + 1], body[start + length :]


class ShapeCache(Generic[ShapeT]):
    """A cache of the newest request shapes of one set of models, which is dropped with the
    models.
    """

    __slots__ = ("_shapes", "get")

    def __init__(self) -> None:
        self._shapes: dict[ShapeKey, ShapeT] = {}
        self.get = self._shapes.get

    def __len__(self) -> int:
        return len(self._shapes)

    def add(
        self, key: ShapeKey, body: bytes, members: Mapping[str, msgspec.Raw], shape: ShapeT
    ) -> None:
        """Cache the shape of a chat request's body, if the body is compact and unambiguous.

        The conversation must be a list whose name is a member of the body's own object.
        """
        prefix = key[0]
        name = prefix.index(_NAME)
        if prefix[name - 1 : name] not in (b"{", b",") or prefix[-1:] != b"[":
            return
        if prefix.count(b"{") != 1 or prefix.count(b"[") != 1:  # nested, or within a string
            return
        start = len(prefix) - 1
        value = members[CONVERSATION]
        if not body.startswith(bytes(value), start) or body[start + len(value)] not in b",}":
            return
        if len(self._shapes) >= MAX_SHAPES:
            self._shapes.clear()
        self._shapes[key] = shape
