"""The tasks that poll health pages, metrics and model lists of endpoints, and test silent engines.

- gateway/fleet/poll_schedule.py decides which pages a poll requests.
- All requests use connections that stay open (gateway/http/poll_client.py).
- A request that could not be sent for a local reason says nothing about the engine: NotSentError.
- If an engine's metrics cannot be read, policies rely on the gateway's own count of requests.
- gateway/fleet/speed_recovery.py decides whether an endpoint that was ejected as slow may return.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from gateway.config import Config
from gateway.fleet import engine_metrics
from gateway.fleet.endpoint_table import OUT_OF_ROTATION, EndpointTable
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.model_list_changes import ModelListNews
from gateway.fleet.poll_schedule import PollPlan, least_probe_s
from gateway.fleet.probe_errors import (
    PROBE_ERRORS,
    NotSentError,
    clear_frames,
    is_not_sent,
    is_own_failure,
    is_unreachable,
    record_resolution,
)
from gateway.fleet.silence_limits import Silences
from gateway.fleet.speed_recovery import SpeedRecovery, is_ejected_as_slow
from gateway.http.poll_client import PollClient
from gateway.protocol.api_table import RESPONSES, api_paths
from gateway.protocol.response.http_framing import FramingError
from gateway.protocol.response.usage_and_error_search import client_error_status, find_error_body
from gateway.protocol.response_store_probe import shows_store, store_request
from gateway.protocol.translate.translation_table import TRANSLATIONS
from kvtransfer.dialects import standalone_members
from policies.engine_kinds import ENGINE_TRAITS, MODELS_PATH
from policies.health.endpoint_health import is_probe_due
from policies.routing_types import Role

log = logging.getLogger("penstock")

METRICS_LIMIT = 4 * 1024 * 1024
MODELS_EVERY_S = 30.0
RECOVERY_S = 1.0  # longest time between two probes of an ejected endpoint, whatever its back-off
CHECK_S = 0.5  # timeout of a health check that a request waits for
NO_PAGE = (404, 405, 501)  # statuses of an engine without the requested page
RATE_LIMITED = 429
OWN_FAILURE_S = 60.0  # shortest time between two logs that this process cannot open connections
FIRST_POLLS = 128  # endpoints polled at the same time before the gateway serves


class HealthChecker:
    """Polls every endpoint in a task, and looks for stalled endpoints in one more task.

    Endpoints that are leaving the configuration get no new requests, so they are not polled.
    """

    def __init__(
        self, config: Config, endpoints: EndpointTable, on_models_changed: Callable[[], None]
    ) -> None:
        # Initialize; `on_models_changed` is called when an engine's list of models has changed.
        self._config = config
        self._endpoints = endpoints
        self._model_lists = ModelListNews(on_models_changed)
        self._tasks: dict[LiveEndpoint, asyncio.Task[None]] = {}
        self._clients: dict[LiveEndpoint, PollClient] = {}
        self._plans: dict[LiveEndpoint, PollPlan] = {}
        self._progress_task: asyncio.Task[None] | None = None
        self._progress_checks: dict[LiveEndpoint, asyncio.Task[None]] = {}
        self._recoveries: dict[LiveEndpoint, asyncio.Task[None]] = {}
        self._silences = Silences()
        self._speed_recovery = SpeedRecovery(endpoints, self._complete)
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
        self._config = config
        if not self._is_started:
            return
        for live in self._endpoints.all():
            if live.is_leaving:
                self._unwatch(live)
            elif live not in self._tasks:
                self._watch(live, immediately=True)

    def _watch(self, live: LiveEndpoint, *, immediately: bool = False) -> None:
        polls = self._poll_repeatedly(live, immediately=immediately)
        self._tasks[live] = asyncio.create_task(polls, name=f"poll {live.endpoint.name}")

    def _unwatch(self, live: LiveEndpoint) -> None:
        for tasks in (self._tasks, self._recoveries, self._progress_checks):
            task = tasks.pop(live, None)
            if task is not None:
                task.cancel()
        self._speed_recovery.forget(live)
        self._silences.forget(live)
        self._plans.pop(live, None)
        client = self._clients.pop(live, None)
        if client is not None:
            client.close()

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
        for client in self._clients.values():
            client.close()

    async def _poll_repeatedly(self, live: LiveEndpoint, *, immediately: bool) -> None:
        # Poll an endpoint until cancelled, with random pauses, so that polls spread over time.
        rng, pause = self._endpoints.rng, 0.0 if immediately else self._endpoints.rng.random()
        while True:
            await asyncio.sleep(self._poll_interval_s() * pause)
            await self._log_errors(self._poll, live)
            pause = rng.uniform(0.9, 1.1)

    async def _check_progress_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self._config.health.progress / 10)
            now = monotonic()
            for live in self._polled():
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
                partial(self._list_models, limit_s=self._config.health.timeout), live
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
        await self._list_models_if_due(live)
        await self._try_apis_if_due(live)

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
            await self._list_models(live, limit_s=min(CHECK_S, self._config.health.timeout))
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
            status, _ = await self._fetch(live, path, timeout_s, METRICS_LIMIT)
            if status not in NO_PAGE:
                return 200 if status == RATE_LIMITED else status
        listed, _ = await self._fetch(live, MODELS_PATH, timeout_s, METRICS_LIMIT)
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
        if _model_of(live) is None:
            return True
        status = await self._complete(live, timeout_s, {"prompt": "1", "max_tokens": 1})
        return status is not None and status < 500

    async def _complete(
        self, live: LiveEndpoint, timeout_s: float, members: dict[str, object]
    ) -> int | None:
        # Request a completion with these members; return its status, or None without an answer.
        # An error with status 200 counts by its code.
        #
        # No model of the engine is known, so nothing is sent to it: None. Raises NotSentError.
        model = _model_of(live)
        if model is None:
            return None
        body = {"model": model, **members}
        if live.endpoint.role is not Role.BOTH:
            body |= standalone_members(live.endpoint.engine)
        try:
            answer = await self._fetch(live, "/v1/completions", timeout_s, METRICS_LIMIT, body)
        except PROBE_ERRORS as error:
            if is_not_sent(error):
                raise NotSentError(str(error)) from None
            return None
        return completion_status(*answer)

    async def _scrape(self, live: LiveEndpoint) -> None:
        path = ENGINE_TRAITS[live.endpoint.engine].metrics_path
        if not path:
            return
        status, text = await self._get(live, path, self._config.scrape.timeout)
        if status == 200:
            self._endpoints.on_scrape(
                live, engine_metrics.parse_scrape(text, live.endpoint.engine, live.endpoint.rank)
            )

    async def _list_models_if_due(self, live: LiveEndpoint) -> None:
        if live.models_at is None or monotonic() - live.models_at >= MODELS_EVERY_S:
            await self._list_models(live, limit_s=self._config.health.timeout)

    async def _list_models(self, live: LiveEndpoint, *, limit_s: float) -> None:
        # Read which models the engine lists; without a response, the last list stays valid.
        try:
            status, text = await self._fetch(live, MODELS_PATH, limit_s, METRICS_LIMIT)
        except FramingError as error:
            _report_unreadable_list(live, str(error))
            return
        except PROBE_ERRORS:
            return
        names: tuple[str, ...] = ()
        if status == 200:
            try:
                cards = json.loads(text)["data"]
                # Ollama writes null for an empty list.
                names = tuple(str(card["id"]) for card in (() if cards is None else cards))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                _report_unreadable_list(live, f"not a list of models: {error!r}")
                return
        elif status not in NO_PAGE:
            if 400 <= status < 500 and status != RATE_LIMITED:
                _report_unreadable_list(live, f"the engine answered {status}")
            return
        is_first, live.models_at, live.has_bad_list = live.models_at is None, monotonic(), False
        if is_first or (names, status == 200) != (live.models, live.has_list):
            live.models, live.has_list = names, status == 200
            self._model_lists.on_changed()
        if not live.api_paths:
            await self._list_apis(live, limit_s)
        await self._learn_store(live, limit_s)

    async def _list_apis(self, live: LiveEndpoint, limit_s: float) -> None:
        # Read the API paths that /openapi.json of the engine lists.
        #
        # Without that page, _try_apis_if_due() tries those that can be translated.
        status, text = await self._get(live, "/openapi.json", limit_s)
        if status == 200 and (paths := api_paths(text)):
            live.api_paths = paths
            self._model_lists.on_changed()

    async def _try_apis_if_due(self, live: LiveEndpoint) -> None:
        # Find out which translatable APIs an engine lacks, if it does not list its APIs.
        #
        # An engine that has an API refuses a request without members, and generates nothing. One
        # that fails instead is not asked again until it returns from an ejection.
        if live.has_tried_apis or live.api_paths or not live.has_list:
            return
        live.has_tried_apis = True
        lacked, missing = ENGINE_TRAITS[live.endpoint.engine].lacked_paths, set[str]()
        for path in TRANSLATIONS.keys() - lacked:
            with suppress(*PROBE_ERRORS):
                status, _ = await self._fetch(live, path, CHECK_S, METRICS_LIMIT, {})
                if status in NO_PAGE:
                    missing.add(path)
        if missing != live.missing_paths:
            live.missing_paths = frozenset(missing)
            self._model_lists.on_changed()

    async def _learn_store(self, live: LiveEndpoint, limit_s: float) -> None:
        # Find out whether the engine stores responses, if it is unknown and matters to the pool.
        #
        # The pool needs to know it if requests are split or resumed, because they are sent as
        # chats.
        name = _model_of(live)
        if live.keeps_responses is not None or name is None or RESPONSES.path not in live.api_paths:
            return
        models = (model for model in self._config.models if model.pool == live.endpoint.pool)
        if not any(model.split or model.resume for model in models):
            return
        body = store_request(name)
        with suppress(*PROBE_ERRORS):
            response = await self._fetch(live, RESPONSES.path, limit_s, METRICS_LIMIT, body)
            live.keeps_responses = shows_store(*response)

    async def _get(
        self, live: LiveEndpoint, path: str, timeout_s: float
    ) -> tuple[int | None, bytes]:
        # Return status and body of a GET; the status is None without a response in time.
        try:
            return await self._fetch(live, path, timeout_s, METRICS_LIMIT)
        except PROBE_ERRORS:
            return None, b""

    async def _fetch(
        self,
        live: LiveEndpoint,
        path: str,
        timeout_s: float,
        limit: int,
        json_body: object = None,
    ) -> tuple[int, bytes]:
        # Return status and body of a POST with `json_body`, or of a GET without it.
        #
        # Raises one of PROBE_ERRORS when the engine cannot be reached or does not answer in time.
        client = self._clients.get(live)
        if client is None:
            client = self._clients[live] = PollClient(live.endpoint.url, live.upstream.addresses)
        client.configure(live.key_header, live.encryption)
        try:
            if json_body is None:
                return await client.get(path, timeout_s, limit)
            body = msgspec.json.encode(json_body)
            return await client.post(path, body, timeout_s, limit)
        except PROBE_ERRORS as error:
            clear_frames(error)
            raise


def _report_unreadable_list(live: LiveEndpoint, reason: str) -> None:
    # Log once that an engine's list of models cannot be read.
    if not live.has_bad_list:
        live.has_bad_list = True
        log.warning(
            "the list of models of endpoint %s cannot be read (%s%s): %.200s",
            live.endpoint.name,
            live.endpoint.url,
            MODELS_PATH,
            reason,
        )


def completion_status(status: int, body: bytes) -> int:
    """Return the status of an engine's answer, or that of an error sent with status 200."""
    error = find_error_body(body) if status == 200 else None
    if error is None:
        return status
    return client_error_status(body, error) or 500


def _model_of(live: LiveEndpoint) -> str | None:
    # Return a model name to use in the gateway's own requests, or None if none is known.
    served = live.endpoint.served_model
    if served and (served in live.models or not live.models):
        return served
    return next(iter(live.models), None)
