"""The admin server's pages about the configuration: what is in force, what was, and changing it.

Lives here: requests to triggers, outcomes to answers. Not here: who may ask (trust.py), and what happens (reloader.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from time import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from gateway.config import Loaded, Problem
from gateway.config.compare import Change, shown
from gateway.config.source import FILE_CAP_BYTES
from gateway.config.tls_files import certificates
from gateway.reload.reloader import ChangeOptions, Outcome, Rejection, Reloader
from gateway.reload.trial import tallied
from gateway.reload.versions import Version
from gateway.trust import is_supervisor

if TYPE_CHECKING:
    from gateway.app import App

STATUS: Mapping[str, int] = MappingProxyType(
    {"applied": 200, "unchanged": 200, "dry_run": 200, "rejected": 400, "nothing": 409, "conflict": 412}
)


def add(app: App, routes: web.UrlDispatcher) -> None:
    """GET and PUT /config, GET /config/versions, POST /config/reload and /config/rollback."""
    reloader = app.reloader

    async def read(_: web.Request) -> web.Response:
        snapshot = app.gateway.snapshot
        state = _state(reloader) | {
            "shared": app.shared_state(),
            "file_differs": await asyncio.to_thread(reloader.file_differs),
            "certificates": await asyncio.to_thread(_certificates, reloader.running),
            "generation": snapshot.generation,
            "models": sorted(snapshot.routes),
            "unlisted": dict(sorted(snapshot.unlisted.items())),
            "retiring": app.swap.retiring,
            "config": shown(reloader.running),
        }
        return web.json_response(state, headers={"ETag": reloader.version.etag})

    async def versions(_: web.Request) -> web.Response:
        newest_first = [_version(each) for each in reversed(reloader.versions.all())]
        return web.json_response({"applied": reloader.version.number, "versions": newest_first})

    async def tally(_: web.Request) -> web.Response:
        found = tallied(app.metrics)
        return web.json_response({"ended": found.ended, "failed": found.failed})

    async def put(text: bytes, headers: Mapping[str, str], options: ChangeOptions) -> web.Response:
        return _told(await reloader.put(text, "admin", if_match=headers.get("If-Match"), options=options))

    async def again(options: ChangeOptions) -> web.Response:
        return _told(await reloader.reload("command", options))

    async def rollback(to: int | None, options: ChangeOptions) -> web.Response:
        return _told(await reloader.rollback(to, options=options))

    routes.add_get("/config", read)
    routes.add_get("/config/versions", versions)
    routes.add_get("/config/tally", tally)
    add_changes(routes, put, again, rollback)


def add_changes(
    routes: web.UrlDispatcher,
    put: Callable[[bytes, Mapping[str, str], ChangeOptions], Awaitable[web.Response]],
    again: Callable[[ChangeOptions], Awaitable[web.Response]],
    rollback: Callable[[int | None, ChangeOptions], Awaitable[web.Response]],
) -> None:
    """PUT /config, POST /config/reload and /config/rollback, for one gateway or for several that change together.

    `put` is given the text and the request's headers; `rollback` a version's number, or None for the one before.
    """

    async def on_put(request: web.Request) -> web.Response:
        try:
            text = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _malformed(f"the text is larger than {FILE_CAP_BYTES >> 20} MiB", 413)
        except (RequestPayloadError, ConnectionError):
            return _malformed("the text did not come whole, or is not encoded as its headers say")
        return await put(text, request.headers, _options(request))

    async def on_reload(request: web.Request) -> web.Response:
        return await again(_options(request))

    async def on_rollback(request: web.Request) -> web.Response:
        to = request.query.get("to")
        if to is not None and not (to.isascii() and to.isdigit() and len(to) < 10):
            return _malformed("to= is the number of a version")
        return await rollback(int(to) if to is not None else None, _options(request))

    routes.add_put("/config", on_put)
    routes.add_post("/config/reload", on_reload)
    routes.add_post("/config/rollback", on_rollback)


def _malformed(message: str, status: int = 400) -> web.Response:
    """The refusal of what nobody could try, in the shape of all outcomes."""
    answer = {"result": "rejected", "message": message, "changes": [], "problems": [], "needs_restart": []}
    return web.json_response(answer, status=status)


def _options(request: web.Request) -> ChangeOptions:
    kept = _asked(request, "kept") and is_supervisor(request)
    return ChangeOptions(_asked(request, "dry_run"), _asked(request, "noted"), _asked(request, "force"), kept)


def _asked(request: web.Request, flag: str) -> bool:
    return request.query.get(flag, "0").lower() not in ("0", "false", "no")


def _state(reloader: Reloader) -> dict[str, Any]:
    return {
        "version": reloader.version.number,
        "applied": _version(reloader.version),
        "last_error": _rejection(reloader.last_error),
        "needs_restart": list(reloader.needs_restart),
    }


def _certificates(loaded: Loaded) -> list[dict[str, Any]]:
    """When the certificates in the files expire, and why they are refused now, if they are."""
    return [
        {
            "path": each.path,
            "file": loaded.resolved.hide(each.file),
            "not_after": _time(each.not_after),
            "problem": each.doubt,
        }
        for each in certificates(loaded.config, time())
    ]


def _told(outcome: Outcome) -> web.Response:
    answer = {
        "result": outcome.result,
        "message": outcome.message,
        "version": outcome.version.number,
        "changes": [_change(each) for each in outcome.changes],
        "problems": [_problem(each) for each in outcome.problems],
        "needs_restart": list(outcome.needs_restart),
        "affected": outcome.affected,
        "took_ms": round(outcome.took_s * 1000, 3),
    }
    return web.json_response(answer, status=STATUS[outcome.result], headers={"ETag": outcome.version.etag})


def _version(version: Version) -> dict[str, Any]:
    """Never its text: a secret may stand in it, or in a comment."""
    return {
        "version": version.number,
        "hash": version.hash,
        "etag": version.etag,
        "at": _time(version.at),
        "source": version.trigger,
        "file": version.file,
        "changes": [_change(each) for each in version.changes],
    }


def _change(change: Change) -> dict[str, Any]:
    return {"path": change.path, "before": change.before, "after": change.after, "text": str(change)}


def _rejection(rejection: Rejection | None) -> dict[str, Any] | None:
    if rejection is None:
        return None
    problems = [_problem(each) for each in rejection.problems]
    return {"at": _time(rejection.at), "source": rejection.trigger, "problems": problems}


def _problem(problem: Problem) -> dict[str, Any]:
    fields = {name: getattr(problem, name) for name in problem.__struct_fields__}
    return fields | {"text": str(problem)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
