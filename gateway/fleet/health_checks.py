"""The tasks that poll the health and metrics pages of endpoints, and test silent engines.

- gateway/fleet/poll_schedule.py decides which pages a poll requests.
- probe_requests.py sends the requests, over connections that stay open.
- engine_capabilities.py reads which models and APIs an engine serves.
- A request that could not be sent for a local reason says nothing about the engine: NotSentError.
- If an engine's metrics cannot be read, policies rely on the gateway's own count of requests.
- gateway/fleet/speed_recovery.py decides whether an endpoint that was ejected as slow may return.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import Any

from gateway.config import Config
from gateway.fleet import engine_metrics
from gateway.fleet.endpoint_load_and_health import OUT_OF_ROTATION, EndpointTable
from gateway.fleet.engine_capabilities import EngineCapabilities
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.model_list_changes import ModelListNews
from gateway.fleet.poll_schedule import PollPlan, least_probe_s
from gateway.fleet.probe_errors import (
    PROBE_ERRORS,
    NotSentError,
    is_own_failure,
    is_unreachable,
    record_resolution,
)
from gateway.fleet.probe_requests import (
    METRICS_LIMIT,
    NO_PAGE,
    RATE_LIMITED,
    ProbeRequests,
    known_model,
)
from gateway.fleet.speed_recovery import SpeedRecovery, is_ejected_as_slow
from gateway.fleet.stall_limits import Silences
from gateway.util.work_in_turns import Steps, WorkMeter, run_at_once
from policies.engine_kinds import ENGINE_TRAITS, MODELS_PATH
from policies.health.endpoint_health import is_probe_due

log = logging.getLogger("penstock")

RECOVERY_S = 1.0  # longest time between two probes of an ejected endpoint, whatever its back-off
CHECK_S = 0.5  # timeout of a health check that a request waits for
OWN_FAILURE_S = 60.0  # shortest time between two logs that this process cannot open connections
NEW_POLL_GAP_S = 0.003  # between the first polls of two new endpoints; each takes 0.6 ms of CPU
POLL_ITEMS = 32  # items of a WorkMeter as which the start or the end of an endpoint's polls counts
FIRST_POLLS = 128  # endpoints polled at the same time before the gateway serves


class HealthChecker:
    """Polls every endpoint in a task, and looks for stalled endpoints in one more task.

    Endpoints that are leaving the configuration get no new requests, so they are not polled.
    """

    def __init__(
        self,
        config: Config,
        endpoints: EndpointTable,
        on_models_changed: Callable[[], asyncio.Task[None] | None],
    ) -> None:
        # Initialize; `on_models_changed` is called when an engine's list of models has changed. It
        # may return a task that handles the change.
        self._config = config
        self._endpoints = endpoints
        self._model_lists = ModelListNews(on_models_changed)
        self._tasks: dict[LiveEndpoint, asyncio.Task[None]] = {}
        self._requests = ProbeRequests()
        self._capabilities = EngineCapabilities(config, self._requests, self._model_lists)
        self._plans: dict[LiveEndpoint, PollPlan] = {}
        self._progress_task: asyncio.Task[None] | None = None
        self._progress_checks: dict[LiveEndpoint, asyncio.Task[None]] = {}
        self._recoveries: dict[LiveEndpoint, asyncio.Task[None]] = {}
        self._silences = Silences()
        self._speed_recovery = SpeedRecovery(endpoints, self._requests.complete)
        self._checks: dict[LiveEndpoint, asyncio.Task[bool | None]] = {}
        self._listings: dict[LiveEndpoint, asyncio.Task[None]] = {}
        self._is_started = False
        self._own_failure_due = 0.0

    async def start(self) -> None:
        """Start to poll the health and load of all endpoints.

        Returns after the first poll of every endpoint, so that the first request finds their state.
        """
        self._is_started = True
        first_polls = asyncio.Semaphore(FIRST_POLLS)
        with self._model_lists.held_back():
            await asyncio.gather(
                *(self._poll_first(live, first_polls) for live in self._endpoints.all())
            )
        await self._model_lists.wait_until_reported()
        for live in self._endpoints.all():
            if live not in self._tasks:  # a reload during the first poll has started them
                self._watch(live)
        checks = self._check_progress_repeatedly()
        self._progress_task = asyncio.create_task(checks, name="check progress")

    async def _poll_first(self, live: LiveEndpoint, first_polls: asyncio.Semaphore) -> None:
        async with first_polls:
            await self._log_errors(self._poll, live)

    def reconfigure(self, config: Config) -> None:
        """Apply a new configuration: start to poll added endpoints, stop polling removed ones."""
        run_at_once(self.reconfigure_steps(config))

    def reconfigure_steps(self, config: Config) -> Steps[None]:
        """Do the work of reconfigure() in parts: yield after each, so that requests can run.

        The first new endpoint gets its first health check immediately, the others soon after it.
        """
        self._config = self._capabilities.config = config
        if not self._is_started:
            return
        meter, begins_s = WorkMeter(), 0.0
        for live in self._endpoints.all():
            is_change = live.is_leaving is (live in self._tasks)
            if live.is_leaving:
                self._unwatch(live)
            elif is_change:
                self._watch(live, begins_s)
                begins_s += NEW_POLL_GAP_S
            if meter.is_part_over(POLL_ITEMS if is_change else 1):
                yield

    def _watch(self, live: LiveEndpoint, begins_s: float | None = None) -> None:
        # Poll an endpoint from now on, first after `begins_s` seconds, or None: at a random moment.
        if begins_s is None:
            begins_s = self._poll_interval_s() * self._endpoints.rng.random()
        polls = self._poll_repeatedly(live, begins_s)
        self._tasks[live] = asyncio.create_task(polls, name=f"poll {live.endpoint.name}")

    def _unwatch(self, live: LiveEndpoint) -> None:
        for tasks in (self._tasks, self._recoveries, self._progress_checks):
            task = tasks.pop(live, None)
            if task is not None:
                task.cancel()
        self._speed_recovery.forget(live)
        self._silences.forget(live)
        self._plans.pop(live, None)
        self._requests.forget(live)

    def _poll_interval_s(self) -> float:
        return min(self._config.health.interval, self._config.scrape.interval)

    async def stop(self) -> None:
        tasks: list[asyncio.Task[Any]] = [*self._tasks.values(), *self._progress_checks.values()]
        tasks += [*self._recoveries.values(), *self._checks.values(), *self._listings.values()]
        if self._progress_task is not None:
            tasks.append(self._progress_task)
        self._model_lists.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._requests.close()

    async def _poll_repeatedly(self, live: LiveEndpoint, begins_s: float) -> None:
        # Poll an endpoint until cancelled, with random pauses, so that polls spread over time.
        rng, pause_s = self._endpoints.rng, begins_s
        while True:
            await asyncio.sleep(pause_s)
            await self._log_errors(self._poll, live)
            pause_s = self._poll_interval_s() * rng.uniform(0.9, 1.1)

    async def _check_progress_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self._config.health.progress / 10)
            now, meter = monotonic(), WorkMeter()
            for live in self._polled():
                if meter.is_part_over():
                    await asyncio.sleep(0)
                if live.is_leaving:
                    continue
                silence_s = self._silences.observe(live, now)
                if (
                    live.load.is_available
                    and live not in self._progress_checks
                    and self._is_silent(live, silence_s)
                ):
                    check = self._log_errors(self._check_progress, live)
                    name = f"check progress of {live.endpoint.name}"
                    self._progress_checks[live] = task = asyncio.create_task(check, name=name)
                    task.add_done_callback(partial(self._end_progress_check, live))

    def _polled(self) -> list[LiveEndpoint]:
        # Return the endpoints that are polled: those that are not leaving the configuration.
        return [live for live in self._endpoints.all() if not live.is_leaving]

    def _end_progress_check(self, live: LiveEndpoint, task: asyncio.Task[None]) -> None:
        if self._progress_checks.get(live) is task:
            del self._progress_checks[live]

    def _is_silent(self, live: LiveEndpoint, silence_s: float) -> bool:
        # Return whether requests wait while the engine is silent for half its permitted time.
        return bool(silence_s) and silence_s >= self._silence_limit_s(live) / 2

    def _silence_limit_s(self, live: LiveEndpoint) -> float:
        pool = live.endpoint.pool
        peers = (peer for peer in self._polled() if peer.endpoint.pool == pool)
        return self._silences.limit_s(live, peers, self._endpoints.silence_limit_s(live))

    async def _log_errors(
        self, action: Callable[[LiveEndpoint], Awaitable[None]], live: LiveEndpoint
    ) -> None:
        # Run the action and log any exception, so that no engine's response can end a task.
        try:
            await action(live)
        except Exception:
            log.exception("health check of %s failed", live.endpoint.name)

    def probe_until_recovered(self, live: LiveEndpoint) -> None:
        """Start a task that checks an endpoint's health every second until it recovers.

        The interval is longer if the health checks are configured to be rarer. Does nothing if such
        a task runs already.
        """
        if self._is_started and live not in self._recoveries and not live.is_leaving:
            name = f"probe {live.endpoint.name} until it recovers"
            task = asyncio.create_task(self._probe_until_recovered(live), name=name)
            self._recoveries[live] = task
            task.add_done_callback(lambda _: self._recoveries.pop(live, None))

    async def _probe_until_recovered(self, live: LiveEndpoint) -> None:
        await self._log_errors(self._probe, live)
        while live.health.state in OUT_OF_ROTATION:
            interval_s = max(min(RECOVERY_S, self._config.health.interval), least_probe_s(live))
            await asyncio.sleep(interval_s * self._endpoints.rng.uniform(0.9, 1.1))
            await self._log_errors(self._probe, live)

    async def check(self, live: LiveEndpoint) -> bool | None:
        """Check whether an endpoint is healthy enough to retry a request there.

        Returns None if the endpoint did not respond in time. Concurrent calls for one endpoint
        share one health check.
        """
        if not self._is_started:
            return True
        task = self._checks.get(live)
        if task is None:
            task = asyncio.create_task(self._check(live), name=f"check {live.endpoint.name}")
            self._checks[live] = task
            task.add_done_callback(lambda _: self._checks.pop(live, None))
        return await asyncio.shield(task)

    async def _check(self, live: LiveEndpoint) -> bool | None:
        timeout_s = min(CHECK_S, self._config.health.timeout)
        try:
            status = await self._health_status_despite_pause(live, timeout_s)
        except PROBE_ERRORS as error:
            if not is_unreachable(error):
                return None
            self._endpoints.on_connection_refused(live)
            return False
        # Success is not reported: only _probe() may return an endpoint to rotation.
        if status != 200:
            self._endpoints.on_probe(live, status)
        return status == 200

    def relist(self, live: LiveEndpoint) -> None:
        """Start a task that reads the list of models of an endpoint's engine again.

        Does nothing if such a task runs already.
        """
        if self._is_started and live not in self._listings and not live.is_leaving:
            listing = self._log_errors(
                partial(self._capabilities.read, limit_s=self._config.health.timeout), live
            )
            task = asyncio.create_task(listing, name=f"read the models of {live.endpoint.name}")
            self._listings[live] = task
            task.add_done_callback(lambda _: self._listings.pop(live, None))

    async def read_models(self, live: LiveEndpoint) -> None:
        """Read the list of models of an endpoint's engine again; wait for it for a short time."""
        self.relist(live)
        task = self._listings.get(live)
        if task is not None:
            await asyncio.wait([task], timeout=CHECK_S)

    async def _poll(self, live: LiveEndpoint) -> None:
        # Send the requests that are due to one endpoint, one after another over one connection.
        plan = self._plans.setdefault(live, PollPlan())
        plan.begin(live, self._config, len(self._plans), monotonic())
        if plan.needs_probe and live not in self._recoveries:
            await self._probe(live)
        if plan.needs_scrape:
            await self._scrape(live)
        await self._capabilities.read_if_due(live)
        await self._capabilities.try_apis_if_due(live)

    async def _probe(self, live: LiveEndpoint) -> None:
        try:
            status = await self._probe_page(live)
            is_due = is_probe_due(live.health, monotonic()) or self._endpoints.is_needed(live)
            if status == 200 and not await self._shows_work(live, is_due=is_due):
                status = None
        except NotSentError as not_sent:
            self._log_own_failure(not_sent)
            return
        if status == 200 and is_due and live.health.state in OUT_OF_ROTATION:
            # The engine may have been restarted with other models, or as another version.
            live.api_paths, live.has_tried_apis, live.keeps_responses = frozenset(), False, None
            await self._capabilities.read(live, limit_s=min(CHECK_S, self._config.health.timeout))
        self._endpoints.on_probe(live, status)

    async def _probe_page(self, live: LiveEndpoint) -> int | None:
        # Return the status of an engine's health page, or None if it did not answer.
        #
        # Raises NotSentError.
        try:
            status = await self._health_status_despite_pause(live, self._config.health.timeout)
        except PROBE_ERRORS as error:
            record_resolution(live, error)
            if is_own_failure(error):
                raise NotSentError(str(error)) from None
            if is_unreachable(error):
                self._endpoints.on_connection_refused(live)
            return None
        live.is_unresolved = False
        return status

    async def _shows_work(self, live: LiveEndpoint, *, is_due: bool) -> bool:
        # Return whether an engine that was ejected as stalled or slow works again, if it was.
        #
        # Raises NotSentError.
        if live.is_stalled and is_due:
            generates = await self._generates(live, self._config.health.timeout)
            if generates:
                self._endpoints.on_progress(live)
            return generates
        if is_ejected_as_slow(live) and is_probe_due(live.health, monotonic()):
            return await self._speed_recovery.is_as_fast_as_peer(live)
        return True

    def _log_own_failure(self, error: BaseException) -> None:
        # Log at most once a minute that probes fail because of this process.
        if monotonic() >= self._own_failure_due:
            self._own_failure_due = monotonic() + OWN_FAILURE_S
            log.error("health checks fail, because this process cannot open connections: %s", error)

    async def _health_status_despite_pause(self, live: LiveEndpoint, timeout_s: float) -> int:
        # Return what _health_status() returns; if the gateway paused at its timeout, try once more.
        #
        # After a pause, the event loop may handle the timeout before it reads the answer.
        try:
            return await self._health_status(live, timeout_s)
        except TimeoutError:
            if not self._was_paused():
                raise
        return await self._health_status(live, timeout_s)

    def _was_paused(self) -> bool:
        return self._endpoints.speed_monitor.was_paused(monotonic())

    async def _health_status(self, live: LiveEndpoint, timeout_s: float) -> int:
        # Return the status of an engine's health page, or of its list of models if it has none.
        #
        # An engine that only limits the rate of polls (429) is healthy: 200. Raises one of
        # PROBE_ERRORS, as _fetch() does.
        if not live.lacks_health:
            path = ENGINE_TRAITS[live.endpoint.engine].health_path or self._config.health.path
            status, _ = await self._requests.fetch(live, path, timeout_s, METRICS_LIMIT)
            if status not in NO_PAGE:
                return 200 if status == RATE_LIMITED else status
        listed, _ = await self._requests.fetch(live, MODELS_PATH, timeout_s, METRICS_LIMIT)
        if listed == RATE_LIMITED:
            return 200
        if listed == 200 and not live.lacks_health:
            name = live.endpoint.name
            log.info("endpoint %s has no health page; its list of models is probed instead", name)
        live.lacks_health = listed == 200
        return listed

    async def _check_progress(self, live: LiveEndpoint) -> None:
        # Request one token from an endpoint that has been silent too long.
        #
        # If none arrives, the endpoint is reported as stalled.
        limit_s = self._silence_limit_s(live)
        silence_s = live.upstream.silence_duration_s(monotonic())
        timeout_s = max(self._config.health.timeout, limit_s - silence_s)
        try:
            is_generating = await self._generates_despite_pause(live, timeout_s)
        except NotSentError as not_sent:
            self._log_own_failure(not_sent)
            return
        if is_generating:
            if live.upstream.silence_duration_s(monotonic()) > silence_s:
                self._silences.on_test_token(live)
            self._endpoints.on_progress(live)
        elif live.upstream.silence_duration_s(monotonic()) > silence_s:
            # No client request has received a byte in the meantime either.
            log.warning(
                "endpoint %s has sent nothing for %.1f s, and a test request for one token failed",
                *(live.endpoint.name, limit_s),
            )
            self._endpoints.on_stall(live)

    async def _generates_despite_pause(self, live: LiveEndpoint, timeout_s: float) -> bool:
        is_generating = await self._generates(live, timeout_s)
        if not is_generating and self._was_paused():
            return await self._generates(live, self._config.health.timeout)
        return is_generating

    async def _generates(self, live: LiveEndpoint, timeout_s: float) -> bool:
        # Return whether the engine generates one token in time.
        #
        # A 4xx response shows nothing about the engine, so it counts as success. Raises
        # NotSentError.
        if known_model(live) is None:
            return True
        status = await self._requests.complete(live, timeout_s, {"prompt": "1", "max_tokens": 1})
        return status is not None and status < 500

    async def _scrape(self, live: LiveEndpoint) -> None:
        path = ENGINE_TRAITS[live.endpoint.engine].metrics_path
        if not path:
            return
        status, text = await self._requests.get(live, path, self._config.scrape.timeout)
        if status == 200:
            self._endpoints.on_scrape(
                live, engine_metrics.parse_scrape(text, live.endpoint.engine, live.endpoint.rank)
            )
