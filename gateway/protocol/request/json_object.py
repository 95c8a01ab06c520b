"""Finds the members of a JSON object whose values are long. No I/O.

Compiled builds search in C (_json_object.c, docs/decisions/0028-bytes-in-c.md), which takes a
quarter of the time of msgspec for plain text, and up to twice its time where every other byte is an
escape. Others always leave the search to the caller.
"""

from __future__ import annotations

try:
    from gateway.protocol.request._json_object import find_members as find_members
except ImportError:
    import msgspec

    def find_members(
        text: bytes, raw: type[msgspec.Raw], /
    ) -> tuple[dict[str, msgspec.Raw], bool] | None:
        """Return the members of an object as raw JSON by name, and whether the text is ASCII.

        Returns None if the text is not JSON, or is written unusually: then msgspec decides. This
        Python version always does.
        """
        return None
