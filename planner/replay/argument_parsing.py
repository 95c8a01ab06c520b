"""Parses option values of `penstock replay`: durations and loads.

fault_grammar.py parses the option `--faults`, and service_classes.py the option `--slo`.
"""

from __future__ import annotations

import re

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
SPAN = r"\d+(?:\.\d+)?(?:ms|s|m|h)?"
"""Regular expression of the durations that parse_seconds() reads."""


class ArgumentError(ValueError):
    """Raised if an argument of `penstock replay` is invalid.

    The message contains the wrong part.
    """


def parse_seconds(text: str) -> float:
    """Parse a duration such as 250ms, 30s, 5m or 1h, and return it in seconds.

    A number without a unit is in seconds. Raises ArgumentError if the text is invalid.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ArgumentError(f"{text!r} is not a valid time; examples are 250ms, 30s, 5m and 1h")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_loads(text: str) -> list[float]:
    """Parse a list of positive numbers such as `0.5,1,2`. Raises ArgumentError if it is invalid."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{text!r} is not a list of numbers; an example is 0.5,1,2") from None
    if not all(0 < load < float("inf") for load in numbers):
        raise ArgumentError(f"loads must be above 0, not {text!r}")
    return numbers
