"""Tests that gauges of an endpoint count only this gateway's requests, so that they can be
added.
"""

from __future__ import annotations

from types import SimpleNamespace

from gateway.metrics.catalogue import Metrics
from policies.endpoint_load import EndpointLoad
from policies.engine.peer_load import PeerShare
from policies.health.endpoint_health import HealthState
from policies.load_ledger import set_peer_load


def test_gauges_leave_out_tokens_that_other_gateways_reserved() -> None:
    load = EndpointLoad(slot=0)
    load.prefill_tokens, load.decode_tokens = 700, 50
    assert set_peer_load(
        load, b"another", PeerShare(in_flight=1, prefill_tokens=300, decode_tokens=20), now=1.0
    )
    assert (load.prefill_tokens, load.decode_tokens) == (1000, 70)
    metrics = Metrics()
    metrics.runtime_gauges.attach_endpoint(
        SimpleNamespace(  # type: ignore[arg-type]
            endpoint=SimpleNamespace(name="a"),
            load=load,
            health=SimpleNamespace(state=HealthState.UP),
            upstream=SimpleNamespace(silence_duration_s=lambda now: 0.0),
        ),
        lambda: 2.0,
    )
    page = metrics.render().decode()
    assert 'penstock_endpoint_prefill_backlog_tokens{endpoint="a",pool=""} 700' in page
    assert 'penstock_endpoint_context_tokens{endpoint="a",pool=""} 50' in page
