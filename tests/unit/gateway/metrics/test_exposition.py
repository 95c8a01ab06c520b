"""Tests that a metric gives the same text whether it is formatted at once or in parts."""

from __future__ import annotations

import pytest

from gateway.metrics.exposition import (
    PART_HISTOGRAMS,
    PART_SERIES,
    render_family,
    render_family_in_parts,
)
from gateway.metrics.metric_types import FamilyReading, HistogramValue, Label, MetricRegistry


def family(kind: str, count: int) -> FamilyReading:
    registry = MetricRegistry()
    section = registry.section("row", "owner")
    label = Label("endpoint")
    if kind == "histogram":
        section.histogram("penstock_a_seconds", "# Text.", (0.5, 1.0), label)
        value: object = HistogramValue((1, 2, 3), 4.5)
    else:
        getattr(section, kind)(
            "penstock_a_total" if kind == "counter" else "penstock_a", "x", label
        )
        value = 3.0
    spec = registry.families[0].spec
    return FamilyReading(spec, {(f"e{number}",): value for number in range(count)})  # type: ignore[misc]


@pytest.mark.parametrize("exemplars", [False, True])
@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram"])
@pytest.mark.parametrize("count", [0, 1, PART_HISTOGRAMS + 1, 3 * PART_SERIES])
def test_parts_together_are_the_family(kind: str, count: int, exemplars: bool) -> None:
    reading = family(kind, count)
    parts = list(render_family_in_parts(reading, exemplars=exemplars))
    assert b"".join(parts) == render_family(reading, exemplars=exemplars)
    size = PART_HISTOGRAMS if kind == "histogram" else PART_SERIES
    assert len(parts) == max(1, -(-count // size))
