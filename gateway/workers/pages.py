"""The one admin server of several workers: what they say made one, what changes something asked of all.

Whatever else an admin server shows is the eldest worker's word; an explanation is whose request it was. Not here: how
pages are made one (gateway/workers/metrics_merge.py, gateway/workers/live_view_merge.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from aiohttp import web

from gateway.admin import live_pages
from gateway.admin.auth import guard
from gateway.admin.config_pages import add_changes
from gateway.admin.recent_requests import Query, add_requests, together
from gateway.config.yaml_source import FILE_CAP_BYTES
from gateway.metrics.exposition import content_type, wants_openmetrics
from gateway.reload.reloader import ChangeOptions
from gateway.workers import metrics_merge
from gateway.workers.config_rollout import Configured
from gateway.workers.counter_totals import Counted
from gateway.workers.live_view_merge import Watch
from gateway.workers.supervisor_metrics import Figures
from gateway.workers.worker_process import LOST, Answer, Worker

PASSED_ON = ("Content-Type", "ETag")


class WorkerGroup(Protocol):
    """The workers of one machine as the admin server reads them. The supervisor implements it."""

    draining: bool

    @property
    def configured(self) -> Configured: ...

    @property
    def figures(self) -> Figures: ...

    def ready(self) -> list[Worker]:
        """The workers that serve, the oldest first."""

    def ending(self) -> list[Worker]:
        """The workers that finish their last requests."""


def application(group: WorkerGroup) -> web.Application:
    """Everything it answers."""
    configured = group.configured
    server = web.Application(middlewares=[guard(lambda: configured.running.config)], client_max_size=FILE_CAP_BYTES + 1)
    _add_merged(group, server.router)
    _add_changes(group, server.router)
    live_pages.add_view(server, Watch(group.ready).look, lambda: group.draining)

    async def anything(request: web.Request) -> web.Response:
        return _passed(await first(group.ready(), request.path_qs))

    server.router.add_get("/{anything:.*}", anything)
    return server


def _add_merged(group: WorkerGroup, routes: web.UrlDispatcher) -> None:
    """What all say, made one."""
    counted = Counted(group.ready, group.ending)

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if group.draining:
            return web.Response(status=503, text="draining\n")
        told = await _all(group.ready(), "/readyz")
        if any(each.status == 200 for each in told):
            return web.Response(text="ready\n")
        return web.Response(status=503, text=told[0].body.decode() if told else "no worker serves\n")

    async def metrics(request: web.Request) -> web.Response:
        exemplars = wants_openmetrics(request.headers.get("Accept", ""))
        page = await counted.page(group.figures.readings(), exemplars=exemplars)
        return web.Response(body=page, headers={"Content-Type": content_type(exemplars=exemplars)})

    async def requests(query: Query) -> dict[str, Any]:
        told = await _all(group.ready(), query.path)
        return together((json.loads(each.body) for each in told if each.status == 200), query)

    routes.add_get("/healthz", healthz)
    routes.add_get("/readyz", readyz)
    routes.add_get("/metrics", metrics)
    add_requests(routes, requests)
    for path, made in (("/endpoints", metrics_merge.endpoints), ("/shadow", metrics_merge.shadows), ("/canary", metrics_merge.canaries)):
        routes.add_get(path, _merging(group, path, made))


def _merging(
    group: WorkerGroup, path: str, made: Callable[[Iterable[Mapping[str, Any]]], dict[str, Any]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A page of JSON that is made of the workers' pages."""

    async def page(_: web.Request) -> web.Response:
        told = await _all(group.ready(), path)
        return web.json_response(made(json.loads(each.body) for each in told if each.status == 200))

    return page


def _add_changes(group: WorkerGroup, routes: web.UrlDispatcher) -> None:
    """What all take over, or nobody."""
    configured = group.configured

    async def put(text: bytes, headers: Mapping[str, str], options: ChangeOptions) -> web.Response:
        return _passed(await configured.put(text, headers, options))

    async def again(options: ChangeOptions) -> web.Response:
        return _passed(await configured.reload(options))

    async def rollback(to: int | None, options: ChangeOptions) -> web.Response:
        return _passed(await configured.rollback(to, options))

    async def drain(request: web.Request) -> web.Response:
        key = {name: value for name, value in request.headers.items() if name == "Authorization"}
        async with configured.one_at_a_time:
            told = await _all(group.ready(), request.rel_url.raw_path, "POST", key)
        return _passed(told[0]) if told else web.Response(status=503, text="no worker answers\n")

    add_changes(routes, put, again, rollback)
    routes.add_post("/endpoints/{name}/{what:drain|undrain}", drain)


async def _all(
    workers: Iterable[Worker], path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> list[Answer]:
    """What those say who answer."""
    asked = (worker.ask(method, path, headers=headers, timeout_s=5.0) for worker in workers)
    told = await asyncio.gather(*asked, return_exceptions=True)
    return [each for each in told if isinstance(each, Answer)]


async def first(workers: Iterable[Worker], path: str) -> Answer:
    """The first good answer, the eldest asked first; else the last one."""
    answer = Answer(503, {"Content-Type": "text/plain"}, b"no worker answers\n")
    for worker in workers:
        try:
            answer = await worker.ask("GET", path, timeout_s=5.0)
        except LOST:
            continue
        if answer.status < 400:
            break
    return answer


def _passed(answer: Answer) -> web.Response:
    headers = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
    return web.Response(status=answer.status, body=answer.body, headers=headers)
