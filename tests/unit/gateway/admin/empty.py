"""Builds metric samples that are zero except for the given fields."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gateway.admin.metric_samples import MetricSample

_NOTHING = MetricSample(
    0.0, {}, {}, {}, {}, {}, {}, {}, {}, 0.0, (0.0, 0.0), {}, {}, {}, {}, {}, {}
)


def mark(**fields: Any) -> MetricSample:
    return replace(_NOTHING, **fields)
