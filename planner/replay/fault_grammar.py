"""The parser of the option `--faults` of `penstock replay`, such as `slow=1@2m+30sx2,stale=5s`.

    FAULTS = fault ["," fault]...
    fault  = ("lose" | "drain") "=" group "@" time ["+" duration]
           | "slow=" group "@" time ["+" duration] ["x" factor]
           | "cold=" group "@" time
           | "stale=" time | "events=" share | "view=" view

The first three lines are faults of one group, whose effects are in planner/replay/fault_events.py.
The last line is what the simulated gateway does not see, or sees late.
"""

from __future__ import annotations

import re

import msgspec

from planner.replay.argument_parsing import SPAN, ArgumentError, parse_seconds
from planner.replay.fleet_spec import FleetSpec
from planner.replay.replay_options import CacheView, GroupFault, GroupFaultKind, ReplayOptions

_FAULT = re.compile(rf"(lose|slow|drain|cold)=(\d+)@({SPAN})(?:\+({SPAN}))?(?:x(\d+(?:\.\d+)?))?")
_VIEW = re.compile(r"(stale|events|view)=(\S+)")

FAULTS = (
    "lose=0@5m+60s, slow=1@2m+30sx2, drain=2@1m+5m, cold=7@10m (group@time[+duration]), "
    "stale=5s, events=0.3, view=exact"
)


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
        if match[5] and match[1] != "slow":
            raise ArgumentError(f"the fault {part!r} must have no factor; only slow can have one")
        if match[4] and match[1] == "cold":
            raise ArgumentError(f"the fault {part!r} must have no duration")
        duration_s, factor = parse_seconds(match[4]) if match[4] else None, float(match[5] or 2.0)
        if not factor:
            raise ArgumentError(f"the fault {part!r} has an invalid factor; it must be above 0")
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
