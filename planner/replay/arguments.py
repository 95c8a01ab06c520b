"""Arguments of `penstock replay` that have a grammar: durations, loads, service classes, faults. Text to values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from planner.replay.options import Fault, Options, Trouble, View
from planner.replay.spec import FleetSpec
from policies.model import STANDARD, Slo

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_SPAN = r"\d+(?:\.\d+)?(?:ms|s|m|h)?"
_FAULT = re.compile(rf"(lose|slow|drain|cold)=(\d+)@({_SPAN})(?:\+({_SPAN}))?(?:x(\d+(?:\.\d+)?))?")
_VIEW = re.compile(r"(stale|events|view)=(\S+)")

FAULTS = (
    "lose=0@5m+60s, slow=1@2m+30sx2, drain=2@1m+5m, cold=7@10m (group@moment[+for]), stale=5s, events=0.3, view=exact"
)


class ArgumentError(ValueError):
    """An argument that cannot be understood; the message says which part of it."""


class _Class(msgspec.Struct, forbid_unknown_fields=True):
    """A service class as a file has it."""

    ttft: str
    tpot: str
    weight: float = 1.0


def seconds(text: str) -> float:
    """Seconds of 250ms, 30s, 5m, 1h, or a plain number. Raises ArgumentError."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ArgumentError(f"{text!r} is not a time; write 250ms, 30s, 5m or 1h")
    return float(found[1]) * _UNITS_S[found[2]]


def loads(text: str) -> list[float]:
    """The numbers of `0.5,1,2`. Raises ArgumentError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{text!r} is not a list of numbers as 0.5,1,2") from None
    if not all(0 < load < float("inf") for load in found):
        raise ArgumentError(f"{text!r}: loads are above 0")
    return found


def classes(text: str) -> tuple[Slo, Mapping[str, Slo]]:
    """The class of ordinary requests and the named ones: from `ttft=2s,tpot=50ms`, or from a YAML file that has them by
    name. Raises ArgumentError."""
    if "=" not in text:
        return _from_file(Path(text))
    budgets = {"ttft": STANDARD.ttft_s, "tpot": STANDARD.tpot_s}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in budgets:
            raise ArgumentError(f"{part!r}: an SLO is of ttft and tpot, as ttft=2s,tpot=50ms")
        budgets[name.strip()] = seconds(value)
    return Slo("standard", budgets["ttft"], budgets["tpot"]), {}


def _from_file(path: Path) -> tuple[Slo, Mapping[str, Slo]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        plain = msgspec.convert(YAML(typ="safe", pure=True).load(path.read_text()), dict[str, _Class])
        found = {name: Slo(name, seconds(each.ttft), seconds(each.tpot), each.weight) for name, each in plain.items()}
    except (YAMLError, OSError, UnicodeDecodeError, msgspec.ValidationError, ArgumentError) as error:
        raise ArgumentError(f"{path}: {error}") from None
    return found.get("standard", STANDARD), found


def troubled(text: str, spec: FleetSpec, options: Options) -> tuple[FleetSpec, Options]:
    """Fleet and options with everything that a --faults text says. Raises ArgumentError."""
    groups = list(spec.groups)
    faults: list[Fault] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        view = _VIEW.fullmatch(part)
        if view is not None:
            options = _seen(view[1], view[2], options)
            continue
        found = _FAULT.fullmatch(part)
        if found is None:
            raise ArgumentError(f"{part!r}: no fault; write {FAULTS}")
        group, at_s = int(found[2]), seconds(found[3])
        if group >= len(groups):
            raise ArgumentError(f"{part!r}: the fleet's groups are 0 to {len(groups) - 1}")
        if (found[5] and found[1] != "slow") or (found[4] and found[1] == "cold"):
            raise ArgumentError(f"{part!r}: only slow has a factor, and cold has no end")
        for_s, factor = seconds(found[4]) if found[4] else None, float(found[5] or 2.0)
        if not factor:
            raise ArgumentError(f"{part!r}: a factor is above 0")
        if found[1] == "cold":
            groups[group] = msgspec.structs.replace(groups[group], up_at_s=at_s)
        else:
            faults.append(Fault(at_s, group, Trouble(found[1]), for_s, factor))
    return msgspec.structs.replace(spec, kinds=tuple(groups)), msgspec.structs.replace(options, faults=tuple(faults))


def _seen(what: str, value: str, options: Options) -> Options:
    """The options with what `stale=`, `events=` or `view=` says of how the gateway sees the fleet."""
    if what == "stale":
        age_s = seconds(value)
        return msgspec.structs.replace(options, scrape_s=max(age_s, 0.1), scrape_age_s=age_s)
    if what == "view":
        if value not in list(View):
            raise ArgumentError(f"view={value}: there are {', '.join(View)}")
        return msgspec.structs.replace(options, view=View(value))
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ArgumentError(f"events={value}: a share of lost events from 0 to 1")
    return msgspec.structs.replace(options, lost_events=share)
