"""Readers of recorded traffic, one module per format.

All yield TraceRequest (recorded_request.py).
"""

from planner.traces.access_log import access, read_access
from planner.traces.agents import agents
from planner.traces.azure import azure
from planner.traces.b2b import b2b
from planner.traces.bailian import bailian
from planner.traces.mix import MixPart, mix_parts, scale_rate, slice_span
from planner.traces.mooncake import mooncake, read_mooncake
from planner.traces.recorded_request import TraceRequest
from planner.traces.sharegpt import sharegpt
from planner.traces.trace_file import READERS, looks_like, read_trace
from planner.traces.trace_lines import TraceError, open_lines

__all__ = [
    "READERS",
    "MixPart",
    "TraceError",
    "TraceRequest",
    "access",
    "agents",
    "azure",
    "b2b",
    "bailian",
    "looks_like",
    "mix_parts",
    "mooncake",
    "open_lines",
    "read_access",
    "read_mooncake",
    "read_trace",
    "scale_rate",
    "sharegpt",
    "slice_span",
]
