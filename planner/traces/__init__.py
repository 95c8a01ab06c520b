"""Recorded traffic, read into one common form (shape.py): one module per format.

Nothing is sent from here.
"""

from planner.traces.access import access
from planner.traces.agents import agents
from planner.traces.azure import azure
from planner.traces.b2b import b2b
from planner.traces.bailian import bailian
from planner.traces.mix import Part, mixed, scaled, sliced
from planner.traces.mooncake import mooncake, read_mooncake
from planner.traces.shape import TraceError, TraceRequest
from planner.traces.sharegpt import sharegpt
from planner.traces.source import READERS, read_trace

__all__ = [
    "READERS",
    "Part",
    "TraceError",
    "TraceRequest",
    "access",
    "agents",
    "azure",
    "b2b",
    "bailian",
    "mixed",
    "mooncake",
    "read_mooncake",
    "read_trace",
    "scaled",
    "sharegpt",
    "sliced",
]
