"""Measures how long a KV transfer without injected faults takes on this machine.

Tests that inject faults use longer time limits on slow machines.
"""

from __future__ import annotations

import time

from kvtransfer.transports.inproc import InprocWire
from kvtransfer.util.clock import ThreadClock
from tests.chaos.kv_trial_engine import BASE, TrialEngine
from tests.contract.kvtransfer.links import make

_PATIENCE = 100.0  # seconds of every timeout, so long that none expires
_TOKENS = 96


def first_landing_s(transport: str) -> float:
    # Return the seconds that one fetch takes over a new link, without faults.
    #
    # Raises AssertionError if it fails.
    clock = ThreadClock("calm")
    wire = InprocWire(clock)
    source, sink = (
        TrialEngine(name, BASE, [make(transport, wire, _PATIENCE)], clock, seed, _PATIENCE)
        for seed, name in enumerate(("p", "d"))
    )
    sink.expected = lambda name: source.offers[name].content
    for engine in (source, sink):
        engine.agent.open(engine)
    try:
        offer = source.give("calm", _TOKENS, _PATIENCE, layered=False)
        assert offer is not None
        began = time.monotonic()
        landing = sink.take(source.agent.address, "calm", _TOKENS, 0, offer.ticket, _PATIENCE)
        assert landing is not None
        while landing.outcome is None:
            time.sleep(0.005)
        seconds = time.monotonic() - began
        assert landing.outcome.has_landed, landing.outcome
        assert not sink.wrong
        return seconds
    finally:
        for engine in (source, sink):
            engine.agent.begin_close()
        for engine in (source, sink):
            engine.agent.finish_close()
            for region in engine.regions:
                region.close()
        clock.close()
