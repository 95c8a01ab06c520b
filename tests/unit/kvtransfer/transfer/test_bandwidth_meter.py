"""Tests of measuring how fast KV is sent to each other agent."""

from __future__ import annotations

import pytest

from kvtransfer.transfer.bandwidth_meter import BandwidthMeter


def test_bandwidth_is_measured_per_peer_and_transport() -> None:
    bandwidth = BandwidthMeter(half_life_s=1.0)
    assert bandwidth.bytes_per_s("d0", "tcp") is None
    for _ in range(20):
        bandwidth.record("d0", "tcp", 1000, 1.0)
    bandwidth.record("d0", "shm", 7000, 1.0)
    assert bandwidth.all() == {
        ("d0", "tcp"): pytest.approx(1000),
        ("d0", "shm"): pytest.approx(7000),
    }
    bandwidth.record("d0", "tcp", 10_000, 10.0 / 3)
    rate = bandwidth.bytes_per_s("d0", "tcp")
    assert rate is not None
    assert 2500 < rate < 3000
    bandwidth.forget("d0")
    assert bandwidth.all() == {}


def test_a_short_transfer_hardly_moves_the_rate() -> None:
    bandwidth = BandwidthMeter()
    bandwidth.record("d0", "tcp", 1000, 1.0)
    bandwidth.record("d0", "tcp", 1, 0.01)
    bandwidth.record("d0", "tcp", 5, 0.0)
    assert bandwidth.bytes_per_s("d0", "tcp") == pytest.approx(1000, rel=0.02)
