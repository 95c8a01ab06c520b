"""The admin pages GET /metrics, for Prometheus, and /metrics/readings, for a supervisor."""

from __future__ import annotations

import asyncio
from time import monotonic, time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gateway.metrics.exposition import (
    content_type,
    page_end,
    render_family_in_parts,
    wants_openmetrics,
)

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface


def add_metrics(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    """Add the pages /metrics and /metrics/readings to the admin server's `routes`."""

    async def metrics(request: web.Request) -> web.Response:
        exemplars = wants_openmetrics(request.headers.get("Accept", ""))
        page = []
        for family in target.metrics.collect_in_parts(_unix_offset() if exemplars else None):
            await asyncio.sleep(0)
            if family is None:
                continue
            for part in render_family_in_parts(family, exemplars=exemplars):
                page.append(part)
                # A page takes tens of milliseconds at 64 endpoints; let streams continue meanwhile.
                await asyncio.sleep(0)
        page.append(page_end(exemplars=exemplars))
        return web.Response(
            body=b"".join(page), headers={"Content-Type": content_type(exemplars=exemplars)}
        )

    async def readings(request: web.Request) -> web.Response:
        families = []
        for family in target.metrics.collect_in_parts(
            _unix_offset() if "exemplars" in request.query else None
        ):
            if family is not None:
                families.append(family)
            await asyncio.sleep(0)
        return web.Response(
            body=msgspec.msgpack.encode(families), content_type="application/msgpack"
        )

    routes.add_get("/metrics", metrics)
    routes.add_get("/metrics/readings", readings)


def _unix_offset() -> float:
    return time() - monotonic()
