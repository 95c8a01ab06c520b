"""The labels that several metrics share, and the rows of the dashboards."""

from __future__ import annotations

from enum import StrEnum

from gateway.metrics.metric_types import Label

ENDPOINT = Label("endpoint", 1024)
PREFILL, DECODE = Label("prefill", 64), Label("decode", 64)
ENDPOINT_LABELS = ENDPOINT, PREFILL, DECODE
"""Labels whose values are names of endpoints: their series go when the endpoint is removed."""

POOL = Label("pool", 128)
KIND = Label("kind", 32)
RESULT = Label("result", 8)


class Row(StrEnum):
    """A row of panels in the generated dashboards.

    tools/monitoring/dashboards.py assigns the rows to dashboards.
    """

    REQUESTS = "Requests"
    LATENCY = "Latency"
    PROMISES = "Service level objectives"
    ADMISSION = "Admission"
    ENDPOINTS = "Endpoints"
    CACHE = "Prefix cache"
    BATCHES = "Batches"
    SPLIT = "Split requests and KV transfer"
    SHARED = "Several gateways"
    CONFIGURATION = "Configuration"
    PROCESS = "Process"
