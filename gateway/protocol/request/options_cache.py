"""Caches the options of chat requests: all members of a body except its conversation. No I/O.

Most requests of an application differ only in their conversation. The cache is keyed by the bytes
before and after the conversation's value. If these bytes are in the cache, no other member has to
be parsed. Only compact bodies are cached, as SDKs send them.

Equal bytes around the conversation mean equal members, for these reasons. A cached suffix (the
bytes after the conversation) was parsed at depth 1 of its body. It has an even number of quotes,
ends the object, and contains no second conversation. Suppose that another body is valid JSON and
ends with the same suffix.

- The suffix cannot begin inside a string, because the body would then end inside a string.
- The suffix cannot begin at another depth, because the body would then not end at depth 0.

Therefore the suffix contains the same members in both bodies. The bytes between prefix and suffix
are as many as the decoded value of the conversation has, so they contain nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from gateway.protocol.byte_scan import around_value

MAX_SHAPES = 512
"""Maximum number of cached shapes. A full cache is emptied, because shapes in use return with the
next requests.
"""
MAX_SHAPE_BYTES = 1024
"""Maximum number of bytes around the conversation; hashing more of them would take as long as
parsing them.
"""
MAX_PREFIX_BYTES = 256

CONVERSATION = "messages"
_NAME = b'"messages":'

ShapeKey = tuple[bytes, bytes]
"""A cache key: the body's bytes before the conversation's value, and those after it."""

ShapeT = TypeVar("ShapeT")


def shape_key(body: bytes, members: Mapping[str, msgspec.Raw]) -> ShapeKey | None:
    """Return the key under which the options of a chat request are cached; None if they cannot be.

    The options are all members except the conversation. The key has the bytes of the body before
    and after the conversation.
    """
    conversation = members.get(CONVERSATION)
    if conversation is None:
        return None
    return around_value(body, _NAME, len(conversation), MAX_PREFIX_BYTES, MAX_SHAPE_BYTES)


class OptionsCache(Generic[ShapeT]):
    """Remembers the options of recent chat requests, for one set of models.

    When the models change, a new cache is used.
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
        """Remember the options of a chat request, if its body is compact and unambiguous.

        The conversation must be a list, in a member of the body's outermost object.

        key      the bytes of the body around its conversation
        members  all members of the body, as raw JSON
        shape    the parsed options
        """
        prefix = key[0]
        name = prefix.index(_NAME)
        if prefix[name - 1 : name] not in (b"{", b",") or prefix[-1:] != b"[":
            return
        if prefix.count(b"{") != 1 or prefix.count(b"[") != 1:
            return  # the list is nested, or within a string
        start = len(prefix) - 1
        value = members[CONVERSATION]
        if not body.startswith(bytes(value), start) or body[start + len(value)] not in b",}":
            return
        if len(self._shapes) >= MAX_SHAPES:
            self._shapes.clear()
        self._shapes[key] = shape
