"""Data-parallel ranks of one engine as endpoints of their own, and the speeds that ranks share.

With `pin_ranks`, the gateway sends each request to a certain rank of an engine. Ranks that begin
and end their steps together (in lockstep) share the learned speed of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.config import EndpointSpec
from gateway.fleet.live_endpoint import LiveEndpoint
from policies import restart_state
from policies.endpoint_load import EndpointLoad, join_ranks
from policies.routing_types import Endpoint


def split_by_rank(specs: Iterable[EndpointSpec]) -> Iterator[tuple[EndpointSpec, int | None]]:
    """Yield (configuration, rank) once per rank of an engine with `pin_ranks`.

    An engine without `pin_ranks` is yielded once, with the rank None.
    """
    for spec in specs:
        if spec.pin_ranks:
            for rank in range(spec.layout.dp):
                yield spec, rank
        else:
            yield spec, None


def join_lockstep_ranks(members: Iterable[tuple[Endpoint, LiveEndpoint]]) -> None:
    """Find out which ranks of engines run in lockstep, and let these share one learned speed.

    Ranks in lockstep begin and end their steps together. Call this after a reload, which may have
    changed the layout. A rank that no longer runs in lockstep keeps a copy of the shared speed.

    members  each endpoint of the new configuration, with its live endpoint
    """
    engines: dict[tuple[str, str], list[EndpointLoad]] = {}
    for endpoint, live in members:
        if endpoint.rank is not None:
            key = (endpoint.pool, endpoint.url) if endpoint.is_lockstep else endpoint.key
            engines.setdefault(key, []).append(live.load)
    for loads in engines.values():
        if len(loads) == 1 and loads[0].lockstep_ranks:
            loads[0].belief = restart_state.copy_belief(loads[0].belief)
        join_ranks(loads)
