"""Reads integers in every form that vLLM accepts: 3, 3.0 and "3" are the same integer."""

from __future__ import annotations

import re

_INTEGER = re.compile(r"\s*([+-]?[0-9]{1,24})(?:\.0*)?\s*", re.ASCII)


def lax_integer(value: object) -> int | None:
    """Return a decoded JSON value as an integer; None if it is not one.

    The result for true or false is None, because such a value probably belongs to another member.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    match = _INTEGER.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else int(match[1])
