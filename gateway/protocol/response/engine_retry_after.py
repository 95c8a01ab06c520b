"""Reads the Retry-After header of an engine's refusal: the seconds until it accepts requests again.

gateway/fleet/temporary_limits.py bounds the time, and uses other endpoints until it has passed.
"""

from __future__ import annotations

import re
from email.utils import mktime_tz, parsedate_tz

STATUSES = (429, 503)
"""The statuses of refusals, whose Retry-After is read."""
_SECONDS = re.compile(rb"\nretry-after[ \t]*:[ \t]*([0-9]{1,6}(?:\.[0-9]{1,6})?)[ \t]*\r")
_DATES = re.compile(
    rb"\n(retry-after|date)[ \t]*:[ \t]*"
    rb"([a-z]{3}, [0-9]{2} [a-z]{3} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} gmt)[ \t]*\r"
)


def read_wait_s(head: bytes) -> float | None:
    """Return the seconds in the Retry-After of a response head; None if it names no valid time.

    A date counts from the head's own Date, because heads are cached and clocks differ.
    """
    lowered = head.lower()
    match = _SECONDS.search(lowered)
    if match is not None:
        return float(match[1])
    times: dict[bytes, float] = {}
    for name, date in _DATES.findall(lowered):
        parsed = parsedate_tz(date.decode())
        if parsed is not None:
            times[name] = float(mktime_tz(parsed))
    if len(times) < 2:
        return None
    return max(0.0, times[b"retry-after"] - times[b"date"])
