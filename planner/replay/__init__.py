"""Replays traffic on simulated engines in virtual time, with the gateway's own policies.

A TP group is one simulated engine. Readers of recorded traffic are in planner/traces.
"""

from planner.replay.fleet_sim import replay
from planner.replay.fleet_spec import FleetError, FleetSpec, GroupKind, preset, read_fleet
from planner.replay.replay_options import (
    CacheView,
    ClientBehaviour,
    GroupFault,
    GroupFaultKind,
    ReplayOptions,
)
from planner.replay.results import ReplayRecord, ReplayRun, RequestEnd
from planner.replay.traffic import ClosedLoop, Traffic, traffic, users

__all__ = [
    "CacheView",
    "ClientBehaviour",
    "ClosedLoop",
    "FleetError",
    "FleetSpec",
    "GroupFault",
    "GroupFaultKind",
    "GroupKind",
    "ReplayOptions",
    "ReplayRecord",
    "ReplayRun",
    "RequestEnd",
    "Traffic",
    "preset",
    "read_fleet",
    "replay",
    "traffic",
    "users",
]
