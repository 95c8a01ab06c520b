"""Subscribes to the KV events of every engine rank, and applies the messages that arrive.

It runs on the event loop in slices of at most a millisecond, so that it delays no request for
longer.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

import zmq

from gateway.config.kv_event_sections import KvEvents
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.kv_events.event_metrics import copy_counts
from gateway.fleet.kv_events.event_verification import EndpointEvents
from gateway.fleet.kv_events.exact_prefixes import ExactPrefixes
from gateway.fleet.kv_events.zmq_addresses import (
    SGLANG_PATH,
    VLLM_PATH,
    SourceAddress,
    SourceError,
    configured_addresses,
    described_by_sglang,
    described_by_vllm,
    of_rank,
)
from gateway.fleet.kv_events.zmq_subscription import Subscription
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.http.engine_poll_client import ConnectError, ConnectionLostError, PollClient
from gateway.metrics.catalogue import Metrics
from gateway.protocol.response.http_response_parser import FramingError
from policies.routing_types import EngineKind

log = logging.getLogger("penstock")

DRAIN_S, BUSY_DRAIN_S = 0.02, 0.002
"""Seconds between two reads of the sockets.

DRAIN_S       while the sockets are empty
BUSY_DRAIN_S  after a read that found messages
"""

IDLE_SHARE = 0.03
"""Largest share of the event loop's time (0 to 1) for reading sockets that turn out to be empty.

With many endpoints, one pass over their sockets takes long; the pause after it is then extended.
"""

SLICE_S = 0.001
PURGED_PER_SLICE = 1000
SYNC_S = 0.5
DESCRIPTION_TIMEOUT_S, DESCRIPTION_RETRY_S = 2.0, 10.0
MAX_DESCRIPTION_BYTES = 4 * 1024 * 1024


class _Watched:
    __slots__ = ("addresses", "live", "queried_at", "source_query", "spec", "subscriptions")

    def __init__(self, live: LiveEndpoint, spec: KvEvents) -> None:
        self.live, self.spec = live, spec
        self.addresses: list[SourceAddress] = []
        self.subscriptions: list[Subscription] = []
        self.source_query: asyncio.Task[None] | None = None
        self.queried_at = float("-inf")


class KvEventReader:
    """Reads the KV events of all endpoints that have the setting `kv_events`.

    It subscribes to added endpoints, and ends the subscriptions to removed ones.
    """

    def __init__(self, endpoints: EndpointTable, exact: ExactPrefixes, metrics: Metrics) -> None:
        self._endpoints, self._exact, self._metrics = endpoints, exact, metrics
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # The default, 1023, is for 341 sources: each has a subscription, its monitor and a replay.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._watched: dict[LiveEndpoint, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0
        self._synced_at = float("-inf")
        self._exact_names: frozenset[str] = frozenset()
        self._seen_names: frozenset[str] = frozenset()

    def start(self) -> None:
        self._run()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        source_query = [
            entry.source_query for entry in self._watched.values() if entry.source_query is not None
        ]
        for live in list(self._watched):
            self._unwatch(live)
        await asyncio.gather(*source_query, return_exceptions=True)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        pause_s, now = DRAIN_S, monotonic()
        try:
            if now - self._synced_at >= SYNC_S:
                self._synced_at = now
                self._sync(now)
                now = monotonic()
            has_worked = self._drain()
            pause_s = max(DRAIN_S, (monotonic() - now) / IDLE_SHARE)
            if has_worked:
                pause_s = BUSY_DRAIN_S
        except Exception:  # an error must not end the reading of other endpoints
            log.exception("reading KV events failed")
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._run)

    def _drain(self) -> bool:
        # Apply messages for at most SLICE_S; return whether a source has more.
        #
        # The next call begins where this one has ended.
        subscriptions = [
            subscription for entry in self._watched.values() for subscription in entry.subscriptions
        ]
        count, ends = len(subscriptions), monotonic() + SLICE_S
        is_left = self._exact.cached.purge(PURGED_PER_SLICE)
        for _ in range(count):
            self._next = (self._next + 1) % count
            is_left |= subscriptions[self._next].drain(monotonic, ends)
            if monotonic() > ends:
                break
        self._exact.refresh(monotonic())
        return is_left

    def _sync(self, now: float) -> None:
        current = {
            live: live.spec.kv_events
            for live in self._endpoints.all()
            if live.spec.kv_events is not None and not live.is_leaving
        }
        for live, entry in list(self._watched.items()):
            if current.get(live) != entry.spec:
                self._unwatch(live)
        for live, spec in current.items():
            if live not in self._watched:
                self._watched[live] = _Watched(live, spec)
            self._watch(self._watched[live], now)
        for live in self._watched:
            endpoint = self._exact.endpoints.get(live.load.slot)
            if endpoint is not None:
                for source in endpoint.sources:
                    source.kv_tokens = live.load.kv_tokens
                endpoint.tick(now)
                copy_counts(self._metrics, live.endpoint.name, endpoint)
        self._log_changes(now)

    def _watch(self, entry: _Watched, now: float) -> None:
        # Find an endpoint's sources if they are not known, and subscribe to them.
        live, spec = entry.live, entry.spec
        if live.load.slot not in self._exact.endpoints and not entry.subscriptions:
            self._exact.endpoints[live.load.slot] = EndpointEvents(problem="looking for its source")
        if spec.publisher is not None:
            if not entry.addresses:
                ranks = live.endpoint.layout.dp
                addresses = configured_addresses(spec, live.spec.url, ranks)
                self._subscribe(entry, of_rank(addresses, live.endpoint.rank))
        elif entry.source_query is None and now - entry.queried_at >= DESCRIPTION_RETRY_S:
            entry.queried_at = now
            name = f"find KV events of {live.endpoint.name}"
            entry.source_query = asyncio.create_task(self._query_sources(entry), name=name)

    async def _query_sources(self, entry: _Watched) -> None:
        live = entry.live
        is_sglang = live.endpoint.engine is EngineKind.SGLANG
        client = PollClient(live.spec.url)
        client.configure(live.key_header, live.encryption)
        try:
            path = SGLANG_PATH if is_sglang else VLLM_PATH
            status, body = await client.get(path, DESCRIPTION_TIMEOUT_S, MAX_DESCRIPTION_BYTES)
            describe = described_by_sglang if is_sglang else described_by_vllm
            addresses = of_rank(describe(status, body, live.spec.url), live.endpoint.rank)
        except (ConnectError, ConnectionLostError, FramingError, TimeoutError, OSError):
            return  # the endpoint is down, which its health shows
        except SourceError as error:
            if self._watched.get(live) is entry and not entry.subscriptions:
                self._exact.endpoints[live.load.slot] = EndpointEvents(problem=str(error))
            return
        finally:
            client.close()
            entry.source_query = None
        if self._watched.get(live) is entry and addresses != entry.addresses:
            self._subscribe(entry, addresses)

    def _subscribe(self, entry: _Watched, addresses: list[SourceAddress]) -> None:
        self._close(entry)
        slot = entry.live.load.slot
        self._exact.remove(slot)
        entry.addresses = addresses
        sources = []
        for address in addresses:
            source = self._exact.new_source(has_replay=bool(address.replay))
            sources.append(source)
            try:
                entry.subscriptions.append(Subscription(self._context, address, source))
            except zmq.ZMQError as error:  # a malformed address, or no descriptor is left
                source.fail(f"cannot subscribe to {address.events}: {error}")
        self._exact.endpoints[slot] = EndpointEvents(sources)

    def _unwatch(self, live: LiveEndpoint) -> None:
        entry = self._watched.pop(live)
        if entry.source_query is not None:
            entry.source_query.cancel()
        self._close(entry)
        self._exact.remove(live.load.slot)

    @staticmethod
    def _close(entry: _Watched) -> None:
        for subscription in entry.subscriptions:
            subscription.close()
        entry.subscriptions = []

    def _log_changes(self, now: float) -> None:
        names = {
            live.endpoint.name: self._exact.endpoints[live.load.slot].obstacle(now)
            for live in self._watched
            if live.load.slot in self._exact.endpoints
        }
        exact = frozenset(name for name, obstacle in names.items() if not obstacle)
        if exact != self._seen_names:  # gaps are closed soon; only lasting changes are logged
            self._seen_names = exact
            return
        for name in sorted(exact - self._exact_names):
            log.info("endpoint %s: KV events now describe its prefix cache exactly", name)
        for name in sorted(self._exact_names - exact):
            log.warning(
                "endpoint %s: its prefix cache is predicted again, because KV events do not "
                "describe it exactly (%s)",
                name,
                names.get(name, "removed"),
            )
        self._exact_names = exact
