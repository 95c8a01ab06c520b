"""Parses durations and sizes as people write them: "250ms", "1m30s", "32MiB".

A number without a unit is rejected, because its unit could only be guessed. The arithmetic is exact
in decimals: "0.1s" gives the float 0.1, and a size is always a whole number of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise

_SECONDS = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_NUMBER = r"[0-9]{1,19}(?:\.[0-9]{1,9})?"
_PART = re.compile(rf"({_NUMBER})(us|ms|s|m|h|d)")
_DURATION = re.compile(rf"(?:{_NUMBER}(?:us|ms|s|m|h|d))+")
_SIZE = re.compile(rf"({_NUMBER}) ?({'|'.join(_BYTES)})")
_BARE = re.compile(_NUMBER)
_MISSPELT = re.compile(rf"({_NUMBER}) *([A-Za-z]+)")
_TIME_WORDS = {
    unit: [unit, *words.split()]
    for unit, words in {
        "us": "usec usecs microseconds",
        "ms": "msec msecs millis milliseconds",
        "s": "sec secs second seconds",
        "m": "min mins minute minutes",
        "h": "hr hrs hour hours",
        "d": "day days",
    }.items()
}
# A letter alone, as in nginx's 32m, is a power of 1024.
_SIZE_WORDS = {unit: [unit, unit[0]] if "i" in unit else [unit] for unit in _BYTES}

DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(us|ms|s|m|h|d))+$"
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?([KMGT]i?)?B$"
MAX_DURATION_S = 366 * 86400
MAX_SIZE_BYTES = 2**60


class UnitError(ValueError):
    """Raised for a text that is not a duration or a size; the message shows how to write one."""


def parse_duration(text: str) -> float:
    """Return the number of seconds in a text such as "1m30s".

    Raises UnitError if the text is not a duration.

    Units are us, ms, s, m, h and d, each at most once and the largest first.
    """
    if not _DURATION.fullmatch(text):
        raise UnitError(_not_a_duration(text))
    parts = [(Decimal(number), _SECONDS[unit]) for number, unit in _PART.findall(text)]
    units = [unit for _, unit in parts]
    if any(later >= earlier for earlier, later in pairwise(units)):
        raise UnitError(
            f"{text!r} is not a valid duration; write each unit once, the largest first, as in "
            "1m30s"
        )
    seconds = sum((number * unit for number, unit in parts), Decimal(0))
    if seconds > MAX_DURATION_S:
        raise UnitError(f"the duration {text!r} is too long; the maximum is 366d")
    return float(seconds)


def parse_size(text: str) -> int:
    """Return the number of bytes in a text such as "32MiB".

    Raises UnitError if the text is not a size.

    Units are B, KB to TB (powers of 1000) and KiB to TiB (powers of 1024).
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise UnitError(_not_a_size(text))
    size = Decimal(match[1]) * _BYTES[match[2]]
    if size != int(size):
        raise UnitError(f"the size {text!r} is not a whole number of bytes")
    if size > MAX_SIZE_BYTES:
        raise UnitError(f"the size {text!r} is too large; the maximum is an exbibyte (1048576TiB)")
    return int(size)


def _plain(amount: Decimal) -> str:
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _meant(text: str, words: Mapping[str, Sequence[str]]) -> str:
    # Return the text with the unit that was probably meant, or "" if there is none.
    match = _MISSPELT.fullmatch(text)
    if match is None or type(text) is not str:
        return ""
    word = match[2].lower()
    units = (unit for unit, known in words.items() if word in map(str.lower, known))
    unit = next(units, "")
    return match[1] + unit if unit else ""


def _not_a_duration(text: str) -> str:
    # A text from a ${...} reference may be secret. It has a subclass of str, which hides the value.
    if _BARE.fullmatch(text) and type(text) is str:
        milliseconds = _plain(Decimal(text) / 1000)
        return (
            f"{text!r} is not a duration; write {text}s, "
            f"or {text}ms ({milliseconds}s) if milliseconds are meant"
        )
    meant = _meant(text, _TIME_WORDS)
    if meant:
        return f"{text!r} is not a duration; write {meant}"
    return (
        f"{text!r} is not a duration; "
        "write a number with a unit (us, ms, s, m, h, d), as in 250ms or 1m30s"
    )


def _not_a_size(text: str) -> str:
    if _BARE.fullmatch(text) and type(text) is str:
        return f"{text!r} is not a size; write {text}B, or {text}MiB if mebibytes are meant"
    meant = _meant(text, _SIZE_WORDS)
    if meant:
        return f"{text!r} is not a size; write {meant}"
    return (
        f"{text!r} is not a size; "
        "write a number with a unit (B, KiB, MiB, GiB, KB, MB, GB), as in 32MiB"
    )
