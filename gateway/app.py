"""Builds, starts and stops a gateway. Only this module creates its parts and connects them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic, time

from aiohttp import web

from gateway.admin.connection_shutdown import end_connections
from gateway.admin.endpoints_page import endpoint_rows
from gateway.admin.server import admin_application
from gateway.admission.admission_controller import AdmissionController
from gateway.auto.auto_controller import AutoPolicyController
from gateway.auto.gateway_config_access import GatewayConfigAccess
from gateway.batch.batch_runner import BatchRunner
from gateway.batch.message_batch_handlers import AllBatchPages
from gateway.batch.storage_choice import create_storage
from gateway.config import Config, Limits, Listener, LoadedConfig
from gateway.disagg.handoffs import Handoffs
from gateway.drift.drift_monitor import DriftMonitor, LocalDriftWatch
from gateway.fleet.discovery.discovery import Discovery, create_source
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.health_checks import HealthChecker
from gateway.fleet.kv_events.event_reader_start import KvEventService
from gateway.fleet.kv_events.prompt_learner import Tokenizer
from gateway.fleet.model_alias_lookup import find
from gateway.fleet.prefix_cache_view import create_prefix_caches
from gateway.fleet.speed_monitor import STALL_CHECK_S
from gateway.http.aiohttp_connection import AiohttpConnection
from gateway.http.api_application import api_application
from gateway.http.connection_accept import NewConnections
from gateway.http.connection_limits import ClientConnections
from gateway.http.fast_connection import FastConnection
from gateway.http.listener_sockets import ADMIN, API, SocketsByName
from gateway.http.open_listeners import OpenListeners
from gateway.http.tls_listener import TlsListeners
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics
from gateway.metrics.runtime_gauges import pool_by_label
from gateway.peers.bus_choice import create_bus
from gateway.peers.frame_auth import FrameAuth, create_frame_auth, fingerprint_secret
from gateway.peers.state_exchange import PeerView
from gateway.peers.sync_loop import SyncLoop
from gateway.protocol.cors import new_cors_rule
from gateway.protocol.request.forwarded_headers import TrustedProxies
from gateway.reload.auto_rollback import AutoRollbackMonitor, GatewayRollbackTarget
from gateway.reload.dry_run_and_swap import Swap, attach_metrics
from gateway.reload.file_watcher import FileWatcher
from gateway.reload.history import VersionHistory
from gateway.reload.reloader import Reloader
from gateway.reload.snapshot_plan import build_plan
from gateway.restart.handover_channel import BoundListener, bound_listeners
from gateway.restart.start_options import StartOptions
from gateway.restart.worker_launch_settings import WorkerSettings
from gateway.routes_and_snapshot import Gateway
from gateway.serve_request import create_request_factory
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.accounting import AT_ONCE, Accounting
from gateway.telemetry.cost_counter import LiveCost
from gateway.telemetry.span_exporter import SpanExporter
from gateway.trials.mirror import Mirrors
from gateway.util.client_networks import Networks
from gateway.util.garbage_collection import GcSchedule
from gateway.util.work_in_turns import run_in_turns

log = logging.getLogger("penstock")

SWEEP_S, TICK_S, SETTLE_S = 0.25, 0.1, 0.3
IDLE_CHECK_S = 0.02  # interval of checks whether all requests have ended
FAIL_S = 1.0  # time in which remaining requests are failed when the gateway stops
FLUSH_S, MEMORY_BYTES = 0.05, 16 << 20  # state exchange between workers of one machine


class App:
    """One gateway in one event loop, from start() to stop().

    url          the address of the API; set once it listens
    admin_url    the address of the admin server; set once it listens
    request_end  function that requests the end of the process, as a signal does
    """

    _tick_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, config: Config, origin: StartOptions | None = None) -> None:
        # Build a gateway with `config`; `origin` has what reloads and worker processes need.
        origin = origin or StartOptions(LoadedConfig(config))
        self.config = config
        self.url = self.admin_url = ""
        self.is_draining = False
        self.request_end: Callable[[], None] = lambda: None
        self._local = origin.local
        self.metrics = Metrics()
        self._loop = asyncio.get_running_loop()
        auth = create_frame_auth(config, None if origin.local is None else origin.local.secret)
        self._predecessor, self._has_retired = origin.predecessor, False
        inherited = None if origin.predecessor is None else origin.predecessor.secret
        self.secret = fingerprint_secret(config, auth, inherited)
        self._prefixes = create_prefix_caches(config, self.secret)
        self._admission = AdmissionController(config)
        gauges = self.metrics.runtime_gauges
        self._write_queue = WriteQueue(self._loop)
        rng = Random(secrets.randbits(64))
        self._endpoints = EndpointTable(
            config, self._prefixes, self.metrics, rng, self._write_queue
        )
        self._endpoints.on_change = self._admission.refresh
        self._endpoints.defer = self._loop.call_soon
        self._log = AccessLog(config.observability, self._loop, gauges.log_lines_dropped_total)
        self._tracer = SpanExporter(self.metrics, Random(secrets.randbits(64)), origin.env)
        self._health_checker = self._create_health_checker(config)
        self._kv_events = KvEventService(self._endpoints, self.metrics, self._tokenizer)
        self._sync_loop = None if auth is None else self._create_sync(auth, origin.local, rng)
        self._create_gateway(config, rng)
        self._create_connections(config)
        self._create_reload(origin, rng)
        self._activated = origin.activated
        tls = TlsListeners(gauges, self.connections, self._limits)
        accepted = NewConnections(self._write_queue, self.connections, self._limits)
        self._listeners = OpenListeners(origin.sockets, tls, accepted, self._limits)
        self._admin_server: web.Server | None = None
        self._batches = self._create_batches(config)
        self._gc_schedule = GcSchedule(monotonic())
        self.connections.on_begun = self._gc_schedule.count_connection
        self._sweep_task: asyncio.Task[None] | None = None
        self._attach_gauges()

    def _create_gateway(self, config: Config, rng: Random) -> None:
        outbox = self._write_queue
        plan = build_plan(config, self._endpoints, self._admission)
        self._endpoints.apply(plan.adoption)
        self.gateway = Gateway(
            plan.snapshot,
            self._endpoints,
            self._admission,
            Accounting(
                self.metrics,
                self._log,
                self._tracer,
                outbox.call_after_flush,
                self.secret,
                AT_ONCE,
            ),
            Handoffs(self.metrics, rng, outbox),
        )
        attach_metrics(self.gateway, plan, self.metrics)
        self.metrics.pool_by_label = lambda: pool_by_label(
            self.gateway.snapshot.routes.values(), self._endpoints.all()
        )

    def _create_connections(self, config: Config) -> None:
        # Create what client connections share: their limits, and the factory of their requests.
        trusted = Networks(config.listeners.api.trusted_proxies)
        refused = self.metrics.runtime_gauges.connections_refused_total
        self.connections = ClientConnections(
            self._admission.bodies, trusted, lambda reason: refused.labels(reason).inc()
        )
        proxies = TrustedProxies(trusted) if trusted else None
        self._cors = new_cors_rule(config.listeners.api.cors_origins)
        self._request_factory = create_request_factory(
            self.gateway, self.metrics.itl_seconds, proxies, self._cors
        )

    def _create_health_checker(self, config: Config) -> HealthChecker:
        checker = HealthChecker(config, self._endpoints, self._on_models_changed)
        self._endpoints.on_ejected = checker.probe_until_recovered
        self._endpoints.probe_health = checker.check
        self._endpoints.on_model_gone = checker.relist
        return checker

    def _create_batches(self, config: Config) -> BatchRunner | None:
        if config.batch is None:
            return None
        serve = self._request_factory.serve_for
        storage = create_storage(config.batch)
        return BatchRunner(config.batch, storage, self.gateway, serve, self.metrics)

    def _create_reload(self, origin: StartOptions, rng: Random) -> None:
        self.swap = Swap(self.gateway, self._health_checker, self.metrics)
        history = None if origin.local is None else _versions(self.config, origin.local)
        folder = Path(origin.loaded.file).parent  # relative paths of all configurations start here
        self._discovery = Discovery(
            self._endpoints.discovered, self.swap.rebuild, rng, partial(create_source, folder)
        )
        self.swap.start_discovery = self._discovery.reconfigure
        self.reloader = Reloader(
            origin.loaded,
            origin.file,
            self.swap,
            self.metrics,
            origin.env,
            origin.report_line,
            history,
        )
        self._file_watcher = FileWatcher(self.reloader)
        self._trial = AutoRollbackMonitor(
            GatewayRollbackTarget(self.reloader, self.metrics), origin.report_line
        )
        self.auto = self._create_auto() if origin.local is None else None
        # In worker processes, the supervisor watches for drift.
        self.drift = None if origin.local else DriftMonitor(self.metrics.drift_metrics)
        self._drift_watch = LocalDriftWatch(self.gateway.accounts.shapes, self.drift)
        self._drift_watch.configure(self.config, time())
        is_first = origin.local is None or not origin.local.number
        families, live = self.metrics.mirror_metrics, self._endpoints.all
        self._mirrors = Mirrors(families, live, is_active=is_first)
        self.gateway.mirrors = self._mirrors.configure(self.config)
        self.reloader.on_applied = self._applied

    def _create_auto(self) -> AutoPolicyController:
        # In a worker process, the supervisor has the controller of automatic policy selection.
        rows = partial(endpoint_rows, self.gateway)
        target = GatewayConfigAccess(self.reloader, rows, lambda: self.is_draining)
        return AutoPolicyController(target, self.metrics.auto_metrics)

    async def _applied(self, trigger: str) -> None:
        config = self.reloader.running.config
        self._drift_watch.configure(config, time())
        self.gateway.mirrors = self._mirrors.configure(config)
        self._listeners.configure(config.listeners)
        if self.auto is not None:
            self.auto.on_applied(trigger)
        await self._trial.on_applied(trigger)

    async def start(self) -> None:
        """Poll the engines once, then open the listeners.

        Raises OSError if an address is in use.
        """
        await self._discovery.start(self.config)
        await self._health_checker.start()
        self._kv_events.start_if_due()
        if self._local is not None:
            self._endpoints.drain_by_name(self._local.drained)
        self._live_cost = LiveCost(self.metrics, monotonic())
        self._sweep_task = asyncio.create_task(self._sweep(), name="sweep")
        self._tick()
        self._stall_timer = self._loop.call_later(STALL_CHECK_S, self._check_stalls)
        if self._sync_loop is not None:
            await self._sync_loop.start()
        if self._local is None:  # for workers, the supervisor watches the file
            await self._file_watcher.start()
            self._trial.start()
        if self.auto is not None:
            self.auto.start()
        if self._predecessor is not None:
            state = self.gateway, self.config, self.secret, self.drift
            await self._predecessor.restore_state(*state)
        listeners = self.config.listeners
        factory = await self._connection_factory()
        self.url = await self._listeners.open(API, listeners.api, factory)
        self.admin_url = await self._listen_admin(listeners.admin)
        if self._batches is not None:
            await self._batches.start()
        self._gc_schedule.freeze()
        if self._predecessor is not None:
            await self._predecessor.report_ready(
                self.gateway if self.config.shared is None else None
            )

    @property
    def sockets(self) -> SocketsByName:
        """Return the listening sockets by the names of their listeners."""
        return self._listeners.sockets

    @property
    def bound(self) -> list[tuple[BoundListener, socket.socket]]:
        """Return the listening sockets, each with its listener's name and configured address.

        The listeners are the API and the admin server.
        """
        return bound_listeners(self.config.listeners, self.sockets, self._activated)

    async def retire(self) -> None:
        """Serve the open connections until they end, while a successor process accepts new ones.

        Returns after `timeouts.handover` seconds at the latest. Each idle connection may still
        send one request.
        """
        self.is_draining = self._has_retired = True
        limit_s = self.gateway.snapshot.config.timeouts.handover
        active = self._admission.active_requests
        ends = monotonic() + limit_s
        log.info(
            "drain begins: %d open connections and %d running requests have at most %g s to end",
            len(self.connections),
            active,
            limit_s,
        )
        await self._stop_changes()
        if self._batches is not None:
            await self._batches.stop()
        self._listeners.stop_accepting()
        await asyncio.sleep(0)  # let connections that have just begun be counted
        for client in tuple(self.connections):
            client.drain()
        # A worker keeps its admin server, which its supervisor still queries.
        if self._local is None and self._admin_server is not None:
            await end_connections(self._admin_server, FAIL_S, FAIL_S)
        while monotonic() < ends and not self._has_handed_over():  # noqa: ASYNC110
            await asyncio.sleep(SWEEP_S)

    async def _stop_changes(self) -> None:
        # Stop what changes the configuration without an operator's command.
        await self._file_watcher.stop()
        if self.auto is not None:
            await self.auto.stop()

    def _has_handed_over(self) -> bool:
        has_predecessor = self._predecessor is not None and self._predecessor.is_alive
        return not len(self.connections) and not has_predecessor

    async def stop(self) -> None:
        """Stop accepting, let requests end within `timeouts.shutdown`, then close everything."""
        began, self.is_draining = monotonic(), True
        predecessor_stop = None
        if self._predecessor is not None:
            predecessor_stop = asyncio.create_task(self._predecessor.stop(self._longest_stop_s))
        await self._stop_changes()
        await self._discovery.stop()
        await self._trial.stop()
        if self._batches is not None:
            await self._batches.stop()
        self._listeners.stop_accepting([API])
        if self._write_queue.request_turns.begin_all() or self._local is not None:
            # A connection that was accepted a moment ago is about to send its request.
            await asyncio.sleep(SETTLE_S)
        self._listeners.abort_handshakes()
        await self._end_requests()
        if self._sync_loop is not None:
            await self._sync_loop.stop()
        await self._kv_events.stop()
        await self._mirrors.close()
        await self._health_checker.stop()
        for timer in (self._sweep_task, self._tick_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        await self.swap.stop()  # after the health checker and the sweep, which start its work
        self.gateway.background.close()
        self.gateway.handoffs.close()
        self._endpoints.close()
        self.gateway.accounts.account_ended()
        if predecessor_stop is not None:
            await predecessor_stop
        await self._tracer.close()
        # Requests that were aborted above may have ended only during the last steps.
        self.gateway.accounts.account_ended()
        await self._log.close()
        log.info("drain ended after %.1f s; the gateway process stops", monotonic() - began)

    async def _end_requests(self) -> None:
        # Let requests end within `timeouts.shutdown`, fail those that are left, close listeners.
        shutdown_s = self.gateway.snapshot.config.timeouts.shutdown
        ends = monotonic() + shutdown_s
        log.info(
            "drain begins: %d running requests have at most %g s to end",
            self._admission.active_requests,
            shutdown_s,
        )
        self._write_queue.request_turns.begin_all()
        closing = [connection.close_when_idle() for connection in self._fast_connections()]
        await self._wait_until_idle(closing, ends)
        if monotonic() >= ends:
            log.warning(
                "drain: the time for running requests is over; the remaining %d requests fail now",
                self._admission.active_requests,
            )
            ends = monotonic() + FAIL_S
            await self._fail_requests()
            await self._wait_until_idle(closing, ends)
        await self._listeners.close(max(0.0, ends - monotonic()))
        for connection in self._fast_connections():
            connection.abort()

    @property
    def _longest_stop_s(self) -> float:
        return self.gateway.snapshot.config.timeouts.shutdown + FAIL_S + SETTLE_S

    def reopen_log(self) -> None:
        """Reopen the access log at its configured path, if log rotation has moved the open file."""
        self._log.reopen()

    async def _wait_until_idle(self, closing: Sequence[asyncio.Future[None]], ends: float) -> None:
        # Wait until all requests have ended and all connections have closed.
        #
        # `ends` is the monotonic time at which waiting ends in any case.
        def is_idle() -> bool:
            return not self._admission.active_requests and all(future.done() for future in closing)

        while monotonic() < ends and not is_idle():  # noqa: ASYNC110
            await asyncio.sleep(IDLE_CHECK_S)

    async def _fail_requests(self) -> None:
        # Fail all running requests; a stream in the middle of an event may first receive its rest.
        ends = monotonic() + FAIL_S / 2
        self._endpoints.stop_routing()
        self._admission.retries.stop()
        while self._endpoints.fail_streams() and monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(IDLE_CHECK_S)
        self._endpoints.fail_streams(immediately=True)

    async def stop_being_ready(self) -> None:
        """Report the gateway as not ready, and serve requests for `timeouts.grace` more seconds.

        Load balancers need this time to notice the change.
        """
        self.is_draining = True
        grace_s = self.gateway.snapshot.config.timeouts.grace or 0.0
        log.info(
            "SIGTERM received: readiness checks fail from now on; requests are served for "
            "%g more seconds (timeouts.grace)",
            grace_s,
        )
        await asyncio.sleep(grace_s)

    def shared_state(self) -> dict[str, object] | None:
        """Return the status of state sharing with other gateways, or None if there is none."""
        if self._sync_loop is None or self.config.shared is None:
            return None
        return self._sync_loop.state()

    def _create_sync(self, auth: FrameAuth, local: WorkerSettings | None, rng: Random) -> SyncLoop:
        config, shared = self.config, self.config.shared
        memory_bytes = MEMORY_BYTES if shared is None else shared.memory
        view = PeerView(
            auth,
            self._endpoints,
            self._admission,
            self.metrics,
            config.prefix.block_bytes,
            memory_bytes,
        )
        hub = None if local is None else Path(local.hub)
        bus = create_bus(shared, hub, rng, view.count_drop)
        view.on_suspect = self._health_checker.probe_until_recovered
        view.tenants = lambda: self.gateway.snapshot.config.tenants
        self._endpoints.publish_to_peers(view.updates)
        self._admission.publish_to_peers(view.updates)
        flush_s = FLUSH_S if shared is None else shared.flush
        return SyncLoop(view, bus, flush_s, self.metrics, rng)

    def _limits(self) -> Limits:
        return self.gateway.snapshot.config.limits

    def _fast_connections(self) -> list[FastConnection]:
        return [
            connection for connection in self.connections if isinstance(connection, FastConnection)
        ]

    async def _start_api_server(self) -> web.Server:
        server = api_application(lambda: self.gateway.snapshot, self._cors)
        if self._batches is not None:
            assert self.config.batch is not None
            pages = AllBatchPages(self._batches, lambda: self.gateway.snapshot, self.config.batch)
            pages.add_routes(server)
        runner = web.AppRunner(server, handler_cancellation=True, access_log=None)
        return await self._listeners.add_runner(runner)

    async def _connection_factory(self) -> Callable[[], FastConnection]:
        manager = await self._start_api_server()
        serve, connections = self._request_factory.serve, self.connections
        write_queue = self._write_queue

        def create() -> FastConnection:
            limits = self._limits()  # the connection keeps these limits until it closes

            def create_fallback() -> AiohttpConnection:
                return AiohttpConnection(serve, connections, limits, write_queue, manager)

            connection = FastConnection(serve, connections, limits, write_queue, create_fallback)
            if self._has_retired:  # the connection was accepted just before the sockets closed
                connection.drain()
            return connection

        return create

    async def _listen_admin(self, listener: Listener) -> str:
        runner = web.AppRunner(admin_application(self), access_log=None)
        self._admin_server = await self._listeners.add_runner(runner)
        if self._local is not None:
            await web.UnixSite(runner, self._local.admin).start()
            return ""
        return await self._listeners.open(ADMIN, listener, self._admin_server)

    def _tick(self) -> None:
        self._tick_timer = self._loop.call_later(TICK_S, self._tick)
        self.connections.clock.update(time())
        self.gateway.accounts.account_ended()
        try:
            self._admission.tick(monotonic())
        except Exception:  # an admission may be third-party code
            log.exception("the periodic update of an admission policy failed")

    def _check_stalls(self) -> None:
        # Look for endpoints whose prefill is stalled; this runs more often than the sweep.
        self._stall_timer = self._loop.call_later(STALL_CHECK_S, self._check_stalls)
        try:
            now = monotonic()
            share = self.gateway.snapshot.config.retries.hedge
            self.gateway.hedger.hedge_stalled(share, self._endpoints.check_stalls(now), now)
        except Exception:
            log.exception("a check for stalled endpoints failed")

    async def _sweep(self) -> None:
        # Check all deadlines regularly; the delay of this timer is measured as event loop lag.
        while True:
            due = monotonic() + SWEEP_S  # a sweep that ends many connections takes long itself
            await asyncio.sleep(SWEEP_S)
            now = monotonic()
            self.metrics.loop_lag_seconds.observe(max(0.0, now - due))
            try:
                self.gateway.handoffs.sweep(now)
                await self.connections.sweep(now)
                await run_in_turns(self._endpoints.sweep_steps(now))
                self._kv_events.start_if_due()
                self.gateway.hedger.sweep(self.gateway.snapshot.config.retries.hedge, now)
                # Account ended requests first: accounting later would re-create removed series.
                self.gateway.accounts.account_ended()
                self._charge(now)
                self._drift_watch.sweep(time())
                self.swap.sweep()
                await asyncio.sleep(0)  # give the collection a turn of its own
                self._gc_schedule.collect_young()
                self._gc_schedule.collect_if_due(now, self._admission.active_requests)
            except Exception:  # an error must not stop the deadlines of other connections
                log.exception("the periodic check of timeouts failed")

    def _charge(self, now: float) -> None:
        # Count the cost of engine time since the last sweep.
        config = self.gateway.snapshot.config
        prices, has_tenants = config.hardware.price_per_hour, config.observability.tenants
        self._live_cost.sweep(self._endpoints.all(), prices, has_tenants, now)

    def _tokenizer(self, model: str) -> Tokenizer | None:
        # Return the endpoints with KV events that can tokenize a model's prompts, if any.
        snapshot = self.gateway.snapshot
        route = find(snapshot.routes, model)
        if route is None:
            return None
        slots = snapshot.slots_by_model.get(route.name) or [
            each.load.slot for each in route.candidates
        ]
        return self._kv_events.find_tokenizer(slots, route.resolve_name)

    def _on_models_changed(self) -> asyncio.Task[None]:
        return self.swap.rebuild_after_model_news()

    def _attach_gauges(self) -> None:
        metrics, prefixes = self.metrics, self._prefixes
        admission = self._admission
        metrics.retry_budget_remaining.set_function(lambda: admission.retries.left)
        metrics.open_streams.set_function(lambda: float(admission.active_requests))
        metrics.prefix_index_bytes.set_function(lambda: float(prefixes.index.stats().bytes))
        inside, handoffs = metrics.runtime_gauges, self.gateway.handoffs
        inside.connections.set_function(lambda: float(len(self.connections)))
        inside.body_bytes.set_function(lambda: float(admission.bodies.used_bytes))
        inside.split_live.set_function(lambda: float(handoffs.live_count))
        inside.tasks.set_function(lambda: float(len(asyncio.all_tasks(self._loop))))


def _versions(config: Config, local: WorkerSettings) -> VersionHistory:
    folder = config.reload.state_dir if not local.number else None
    return VersionHistory(None if folder is None else Path(folder), local.version)
