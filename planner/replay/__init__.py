"""Replay of traffic on a fleet of mock TP groups on a virtual clock, with the gateway's own
policies and admission.

Readers of recorded traffic are in planner/traces.
"""

from planner.replay.fleet import replay
from planner.replay.options import Clients, Fault, Options, Trouble, View
from planner.replay.record import End, Record, Run
from planner.replay.spec import FleetError, FleetSpec, Kind, preset, read_fleet
from planner.replay.traffic import ClosedLoop, Traffic, traffic, users

__all__ = [
    "Clients",
    "ClosedLoop",
    "End",
    "Fault",
    "FleetError",
    "FleetSpec",
    "Kind",
    "Options",
    "Record",
    "Run",
    "Traffic",
    "Trouble",
    "View",
    "preset",
    "read_fleet",
    "replay",
    "traffic",
    "users",
]
