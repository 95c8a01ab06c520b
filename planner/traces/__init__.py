"""Recorded traffic, read into one shape (shape.py): one module per format. Nothing is sent from here."""

from planner.traces.agents import agents
from planner.traces.azure import azure
from planner.traces.b2b import b2b
from planner.traces.mooncake import mooncake, read_mooncake
from planner.traces.shape import TraceError, TraceRequest

__all__ = ["TraceError", "TraceRequest", "agents", "azure", "b2b", "mooncake", "read_mooncake"]
