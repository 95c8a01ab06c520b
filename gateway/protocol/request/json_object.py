"""Finds the members of a JSON object whose values are long. No I/O.

Compiled builds search in C (_json_object.c, docs/decisions/0028-bytes-in-c.md). For plain text, it
takes a quarter of the time of msgspec. Other builds always leave the search to the caller.
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

        Returns None if the text is not JSON, or is written unusually; the caller then decodes it
        with msgspec. This Python version always returns None.
        """
        return None
