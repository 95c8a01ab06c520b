"""Parses option values of `penstock replay`: durations, loads and service classes.

The faults of its option `--faults` are parsed by planner/replay/fault_grammar.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from policies.routing_types import STANDARD, Slo

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
SPAN = r"\d+(?:\.\d+)?(?:ms|s|m|h)?"
"""Regular expression of the durations that parse_seconds() reads."""


class ArgumentError(ValueError):
    """Raised if an argument of `penstock replay` is invalid.

    The message contains the wrong part.
    """


class _Class(msgspec.Struct, forbid_unknown_fields=True):
    ttft: str
    tpot: str
    weight: float = 1.0


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


def parse_classes(text: str) -> tuple[Slo, Mapping[str, Slo]]:
    """Parse latency budgets, and return the default service class and the others by name.

    `text` is such as `ttft=2s,tpot=50ms`, or the path of a YAML file. Raises ArgumentError if it is
    invalid.
    """
    if "=" not in text:
        return _from_file(Path(text))
    budgets = {"ttft": STANDARD.ttft_s, "tpot": STANDARD.tpot_s}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in budgets:
            raise ArgumentError(
                f"{part!r} is not a latency budget; give ttft and tpot, such as ttft=2s,tpot=50ms"
            )
        budgets[name.strip()] = parse_seconds(value)
    return Slo("standard", budgets["ttft"], budgets["tpot"]), {}


def _from_file(path: Path) -> tuple[Slo, Mapping[str, Slo]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        plain = msgspec.convert(
            YAML(typ="safe", pure=True).load(path.read_text()), dict[str, _Class]
        )
        classes_by_name = {
            name: Slo(name, parse_seconds(class_.ttft), parse_seconds(class_.tpot), class_.weight)
            for name, class_ in plain.items()
        }
    except (
        YAMLError,
        OSError,
        UnicodeDecodeError,
        msgspec.ValidationError,
        ArgumentError,
    ) as error:
        raise ArgumentError(f"{path}: {error}") from None
    return classes_by_name.get("standard", STANDARD), classes_by_name
