"""The admin pages about workload drift: the state of each watched pool, and records of requests.

A pool's workload drifts when its requests no longer resemble those that it was sized for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gateway.telemetry.drift_records import ShapeRecord, ShapeRecorder

if TYPE_CHECKING:
    from gateway.drift.drift_monitor import DriftMonitor

RECORDS_PATH = "/drift/records"
_decoder = msgspec.msgpack.Decoder(list[ShapeRecord])


def add_drift(routes: web.UrlDispatcher, find: Callable[[], DriftMonitor | None]) -> None:
    """Add the page /drift, which says whether pools get the traffic that they were sized for.

    routes  the routes of the admin server
    find    function that returns the drift monitor of this process, which compares the traffic;
            None if it has none
    """

    async def read(_: web.Request) -> web.Response:
        monitor = find()
        return web.json_response({"pools": []} if monitor is None else monitor.as_json())

    routes.add_get("/drift", read)


def add_records(routes: web.UrlDispatcher, recorder: ShapeRecorder) -> None:
    """Add the page from which the supervisor reads a worker process's records of ended requests.

    The supervisor, which starts the workers, compares the requests of all workers with the
    workload that their pool was sized for.
    """

    async def pop_records(_: web.Request) -> web.Response:
        body = msgspec.msgpack.encode(recorder.pop_records())
        return web.Response(body=body, content_type="application/msgpack")

    routes.add_get(RECORDS_PATH, pop_records, allow_head=False)


def decode_records(body: bytes) -> list[ShapeRecord]:
    """Decode the records of ended requests that a worker process has returned to its supervisor.

    Raises msgspec.DecodeError if the worker's response is invalid.
    """
    return _decoder.decode(body)
