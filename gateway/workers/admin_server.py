"""The admin server of several workers: its pages, from one or all workers, and changes to all.

Pages that are not merged come from the oldest worker. The explanation of a request comes from the
worker that served it. page_merge.py and live_view_merge.py merge pages.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from aiohttp import web

from gateway.admin import live_pages
from gateway.admin.auto_pages import add_auto
from gateway.admin.config_pages import add_changes
from gateway.admin.drift_pages import RECORDS_PATH, add_drift
from gateway.admin.recent_requests_page import RecentQuery, add_requests, merge_recent
from gateway.admin.security import access_middleware
from gateway.auto.auto_controller import AutoPolicyController
from gateway.config.yaml_source import MAX_FILE_BYTES
from gateway.drift.drift_monitor import DriftMonitor
from gateway.metrics.exposition import content_type, wants_openmetrics
from gateway.reload.reloader import ChangeOptions
from gateway.workers import page_merge
from gateway.workers.config_rollout import ConfigRollout
from gateway.workers.live_view_merge import LiveViewMerger
from gateway.workers.metrics_merge import CounterTotals
from gateway.workers.supervisor_metrics import SupervisorMetrics
from gateway.workers.worker_process import REQUEST_ERRORS, Worker, WorkerResponse

FORWARDED_HEADERS = ("Content-Type", "ETag")


class WorkerGroup(Protocol):
    """The workers as the admin server needs them. The supervisor implements this interface."""

    is_draining: bool

    @property
    def config_rollout(self) -> ConfigRollout: ...

    @property
    def auto(self) -> AutoPolicyController: ...

    @property
    def drift(self) -> DriftMonitor: ...

    @property
    def metrics(self) -> SupervisorMetrics: ...

    def ready_workers(self) -> list[Worker]:
        """Return the worker processes that serve requests now, oldest first."""

    def ending_workers(self) -> list[Worker]:
        """Return the replaced workers that are finishing their last requests."""


def workers_application(group: WorkerGroup) -> web.Application:
    """Return the aiohttp application of the admin server that stands for all these workers."""
    configured = group.config_rollout
    server = web.Application(
        middlewares=[access_middleware(lambda: configured.running.config)],
        client_max_size=MAX_FILE_BYTES + 1,
    )
    _add_merged(group, server.router)
    _add_changes(group, server.router)
    add_auto(server.router, lambda: group.auto)
    add_drift(server.router, lambda: group.drift)
    merger = LiveViewMerger(group.ready_workers, group.drift.sentences)
    live_pages.add_view(server, merger.take_sample, lambda: group.is_draining)

    async def any_other(request: web.Request) -> web.Response:
        return _forward(await first_response(group.ready_workers(), request.path_qs))

    async def unknown(_: web.Request) -> web.Response:
        raise web.HTTPNotFound

    # Records are taken once, by the supervisor.
    server.router.add_get(RECORDS_PATH, unknown)
    server.router.add_get("/{path:.*}", any_other)
    return server


def _add_merged(group: WorkerGroup, routes: web.UrlDispatcher) -> None:
    counted = CounterTotals(group.ready_workers, group.ending_workers)

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if group.is_draining:
            return web.Response(status=503, text="draining\n")
        responses = await _request_all(group.ready_workers(), "/readyz")
        if any(response.status == 200 for response in responses):
            return web.Response(text="ready\n")
        return web.Response(
            status=503, text=responses[0].body.decode() if responses else "no worker is ready\n"
        )

    async def metrics(request: web.Request) -> web.Response:
        exemplars = wants_openmetrics(request.headers.get("Accept", ""))
        page = await counted.render_page(group.metrics.collect, exemplars=exemplars)
        return web.Response(body=page, headers={"Content-Type": content_type(exemplars=exemplars)})

    async def requests(query: RecentQuery) -> dict[str, Any]:
        responses = await _request_all(group.ready_workers(), query.path)
        return merge_recent(
            (json.loads(response.body) for response in responses if response.status == 200), query
        )

    routes.add_get("/healthz", healthz)
    routes.add_get("/readyz", readyz)
    routes.add_get("/metrics", metrics)
    add_requests(routes, requests)
    for path, merge_pages in (
        ("/endpoints", page_merge.merge_endpoints),
        ("/shadow", page_merge.merge_shadows),
        ("/canary", page_merge.merge_canaries),
        ("/mirror", page_merge.merge_mirrors),
    ):
        routes.add_get(path, _merged_handler(group, path, merge_pages))


def _merged_handler(
    group: WorkerGroup,
    path: str,
    merge_pages: Callable[[Iterable[Mapping[str, Any]]], dict[str, Any]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    # Return a request handler that merges the JSON pages at `path` of all workers into one.
    #
    # `merge_pages` merges the decoded pages.
    async def page(_: web.Request) -> web.Response:
        responses = await _request_all(group.ready_workers(), path)
        return web.json_response(
            merge_pages(
                json.loads(response.body) for response in responses if response.status == 200
            )
        )

    return page


def _add_changes(group: WorkerGroup, routes: web.UrlDispatcher) -> None:
    configured = group.config_rollout

    async def put(text: bytes, headers: Mapping[str, str], options: ChangeOptions) -> web.Response:
        return _forward(await configured.put(text, headers, options))

    async def reload(options: ChangeOptions) -> web.Response:
        return _forward(await configured.reload(options))

    async def rollback(to: int | None, options: ChangeOptions) -> web.Response:
        return _forward(await configured.rollback(to, options))

    async def drain(request: web.Request) -> web.Response:
        key = {name: value for name, value in request.headers.items() if name == "Authorization"}
        async with configured.lock:
            responses = await _request_all(
                group.ready_workers(), request.rel_url.raw_path, "POST", key
            )
        return (
            _forward(responses[0])
            if responses
            else web.Response(status=503, text="no worker responds\n")
        )

    add_changes(routes, put, reload, rollback)
    routes.add_post("/endpoints/{name}/{what:drain|undrain}", drain)


async def endpoint_rows(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    """Return all endpoints with their state, merged from the pages /endpoints of the workers."""
    responses = await _request_all(workers, "/endpoints")
    merged = page_merge.merge_endpoints(
        json.loads(response.body) for response in responses if response.status == 200
    )
    rows: list[dict[str, Any]] = merged["endpoints"]
    return rows


async def _request_all(
    workers: Iterable[Worker], path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> list[WorkerResponse]:
    # Send a request to all workers; return the responses of those that respond in time.
    requests = (worker.request(method, path, headers=headers, timeout_s=5.0) for worker in workers)
    responses = await asyncio.gather(*requests, return_exceptions=True)
    return [response for response in responses if isinstance(response, WorkerResponse)]


async def first_response(workers: Iterable[Worker], path: str) -> WorkerResponse:
    """Return the first successful response of a worker, beginning with the oldest worker.

    If no response is successful, return the last one; if there is none, return status 503.
    """
    response = WorkerResponse(503, {"Content-Type": "text/plain"}, b"no worker responds\n")
    for worker in workers:
        try:
            response = await worker.request("GET", path, timeout_s=5.0)
        except REQUEST_ERRORS:
            continue
        if response.status < 400:
            break
    return response


def _forward(response: WorkerResponse) -> web.Response:
    headers = {
        name: response.headers[name] for name in FORWARDED_HEADERS if name in response.headers
    }
    return web.Response(status=response.status, body=response.body, headers=headers)
