"""Parses option values of `penstock replay`: durations, loads, service classes and faults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from planner.replay.fleet_spec import FleetSpec
from planner.replay.replay_options import CacheView, GroupFault, GroupFaultKind, ReplayOptions
from policies.routing_types import STANDARD, Slo

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_SPAN = r"\d+(?:\.\d+)?(?:ms|s|m|h)?"
_FAULT = re.compile(rf"(lose|slow|drain|cold)=(\d+)@({_SPAN})(?:\+({_SPAN}))?(?:x(\d+(?:\.\d+)?))?")
_VIEW = re.compile(r"(stale|events|view)=(\S+)")

FAULTS = (
    "lose=0@5m+60s, slow=1@2m+30sx2, drain=2@1m+5m, cold=7@10m (group@time[+duration]), "
    "stale=5s, events=0.3, view=exact"
)


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


def apply_faults(
    text: str, spec: FleetSpec, options: ReplayOptions
) -> tuple[FleetSpec, ReplayOptions]:
    """Parse a --faults text, and return the fleet and the options with these faults.

    Raises ArgumentError if the text is invalid.
    """
    groups = list(spec.groups)
    faults: list[GroupFault] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        view = _VIEW.fullmatch(part)
        if view is not None:
            options = _with_view(view[1], view[2], options)
            continue
        match = _FAULT.fullmatch(part)
        if match is None:
            raise ArgumentError(f"{part!r} is not a valid fault; the forms are {FAULTS}")
        group, at_s = int(match[2]), parse_seconds(match[3])
        if group >= len(groups):
            raise ArgumentError(
                f"the fault {part!r} has an unknown group; the groups are 0 to {len(groups) - 1}"
            )
        if (match[5] and match[1] != "slow") or (match[4] and match[1] == "cold"):
            raise ArgumentError(
                f"the fault {part!r} is invalid: only slow has a factor, and cold has no duration"
            )
        duration_s, factor = parse_seconds(match[4]) if match[4] else None, float(match[5] or 2.0)
        if not factor:
            raise ArgumentError(f"the factor of the fault {part!r} must be above 0")
        if match[1] == "cold":
            groups[group] = msgspec.structs.replace(groups[group], up_at_s=at_s)
        else:
            faults.append(GroupFault(at_s, group, GroupFaultKind(match[1]), duration_s, factor))
    return msgspec.structs.replace(spec, kinds=tuple(groups)), msgspec.structs.replace(
        options, faults=tuple(faults)
    )


def _with_view(key: str, value: str, options: ReplayOptions) -> ReplayOptions:
    if key == "stale":
        age_s = parse_seconds(value)
        return msgspec.structs.replace(options, scrape_s=max(age_s, 0.1), scrape_age_s=age_s)
    if key == "view":
        if value not in list(CacheView):
            raise ArgumentError(f"unknown view={value}; known views: {', '.join(CacheView)}")
        return msgspec.structs.replace(options, view=CacheView(value))
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ArgumentError(
            f"events={value} is invalid: the share of lost events must be between 0 and 1"
        )
    return msgspec.structs.replace(options, lost_events=share)
