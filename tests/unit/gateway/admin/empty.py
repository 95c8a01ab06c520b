"""Creates samples of a gateway's metrics for tests. Fields that are not given are zero."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gateway.admin.live_metric_samples import MetricSample

_NOTHING = MetricSample(
    0.0, {}, {}, {}, {}, {}, {}, {}, {}, 0.0, (0.0, 0.0), {}, {}, {}, {}, {}, {}
)


def mark(**fields: Any) -> MetricSample:
    return replace(_NOTHING, **fields)
