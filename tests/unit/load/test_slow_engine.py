"""Tests that the benchmark of slow engines finds ejections in the gateway's log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from bench.load.slow_engine import _ejected
from gateway.telemetry.operator_log import TextFormatter
from policies.health.endpoint_health import HealthEvent
from tests.unit.gateway.fleet.tables import table_of


async def test_an_ejection_is_found_in_the_log_of_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    table, _, _ = table_of(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    table.on_event(table.all()[0], HealthEvent.SLOW)
    lines = [TextFormatter().format(record) for record in caplog.records]
    (tmp_path / "stderr.log").write_text("\n".join(lines))
    (after_s,) = _ejected(tmp_path, slow_at=caplog.records[-1].created - 7.0)
    assert after_s == pytest.approx(7.0, abs=1e-2)
