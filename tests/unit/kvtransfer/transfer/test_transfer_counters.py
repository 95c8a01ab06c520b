"""Tests that the number of counters per peer is limited, because peers choose their own names."""

from __future__ import annotations

from kvtransfer.transfer.bandwidth_meter import BandwidthMeter
from kvtransfer.transfer.transfer_counters import AgentStats


def test_the_least_recently_used_pair_is_dropped() -> None:
    tally, bandwidth = AgentStats(), BandwidthMeter()
    for index in range(1500):
        for peer in ("steady", f"d{index}"):
            tally.count_sent((peer, "tcp"), 10, 0.5)
            tally.count_received((peer, "tcp"), 20, 0.25)
            bandwidth.record(peer, "tcp", 10, 0.5)
    figures = tally.as_dict()
    for ways in (
        *(figures[name] for name in ("sent_bytes", "sent_s", "moved_bytes", "moved_s")),
        bandwidth.all(),
    ):
        assert len(ways) == 1024
        assert ("d1499", "tcp") in ways
        assert ("d0", "tcp") not in ways
    assert figures["sent_bytes"]["steady", "tcp"] == 15_000
    assert figures["moved_s"]["steady", "tcp"] == 375.0
