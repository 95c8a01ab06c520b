"""The admin server's configuration pages: the current configuration, its history, and changes.

The pages translate HTTP requests to configuration changes, and outcomes to HTTP responses.
security.py authenticates clients, and reload/reloader.py makes the changes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from time import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from gateway.admin.readiness import unserved_models
from gateway.admin.security import is_supervisor
from gateway.config import LoadedConfig, Problem
from gateway.config.diff import ConfigChange, display
from gateway.config.tls_file_rules import named_certificates
from gateway.config.yaml_source import MAX_FILE_BYTES
from gateway.reload.auto_rollback import count_failures
from gateway.reload.history import Version
from gateway.reload.reloader import ChangeOptions, Rejection, Reloader, ReloadOutcome
from gateway.util.work_in_turns import run_in_thread

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface

STATUS: Mapping[str, int] = MappingProxyType(
    {
        "applied": 200,
        "unchanged": 200,
        "dry_run": 200,
        "rejected": 400,
        "nothing": 409,
        "conflict": 412,
    }
)


def add(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    """Add the pages below /config to the admin server of a gateway that is a single process.

    target  the gateway whose configuration the pages show and change
    routes  the routes of the admin server
    """
    _add_state(target, routes)
    reloader = target.reloader

    async def put(text: bytes, headers: Mapping[str, str], options: ChangeOptions) -> web.Response:
        if_match = headers.get("If-Match")
        trigger = options.trigger or "admin"
        return _response(await reloader.put(text, trigger, if_match=if_match, options=options))

    async def reload(options: ChangeOptions) -> web.Response:
        return _response(await reloader.reload("command", options))

    async def rollback(to: int | None, options: ChangeOptions) -> web.Response:
        return _response(await reloader.rollback(to, options=options))

    add_changes(routes, put, reload, rollback)


def _add_state(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    # Add the routes that read the configuration, its history, and the number of failed requests.
    reloader = target.reloader

    async def read(_: web.Request) -> web.Response:
        snapshot, running, etag = target.gateway.snapshot, reloader.running, reloader.version.etag
        state = _state(reloader) | {
            "shared": target.shared_state(),
            "file_differs": await asyncio.to_thread(reloader.file_differs),
            "certificates": await asyncio.to_thread(_certificates, running),
            "generation": snapshot.generation,
            "models": sorted(snapshot.routes),
            "unlisted": dict(sorted(snapshot.unlisted.items())),
            "unserved": dict(sorted(unserved_models(snapshot).items())),
            "retiring": target.swap.retiring,
        }
        # Use a thread, because a configuration with a thousand endpoints takes many milliseconds.
        text = await run_in_thread(lambda: json.dumps(state | {"config": display(running)}))
        return web.json_response(text=text, headers={"ETag": etag})

    async def versions(_: web.Request) -> web.Response:
        newest_first = [_version(version) for version in reversed(reloader.history.all())]
        reply = {"applied": reloader.version.number, "versions": newest_first}
        return web.json_response(reply)

    async def failures(_: web.Request) -> web.Response:
        count = count_failures(target.metrics)
        return web.json_response({"ended": count.ended, "failed": count.failed})

    routes.add_get("/config", read)
    routes.add_get("/config/versions", versions)
    routes.add_get("/config/tally", failures)


def add_changes(
    routes: web.UrlDispatcher,
    put: Callable[[bytes, Mapping[str, str], ChangeOptions], Awaitable[web.Response]],
    reload: Callable[[ChangeOptions], Awaitable[web.Response]],
    rollback: Callable[[int | None, ChangeOptions], Awaitable[web.Response]],
) -> None:
    """Add the admin pages that change the configuration: apply a text, reload the file, roll back.

    The caller passes in the functions that make the changes, because a single gateway process makes
    them in another way than a supervisor of several workers.

    put       function that applies a configuration text; called with the text, the request's
              headers and the options
    reload    function that reads the file again; called with the options
    rollback  function that restores a version; called with its number, or None for the version
              before the current one
    """

    async def on_put(request: web.Request) -> web.Response:
        try:
            text = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _malformed(f"the text is larger than {MAX_FILE_BYTES >> 20} MiB", 413)
        except (RequestPayloadError, ConnectionError):
            return _malformed("the text is incomplete, or not encoded as its headers say")
        return await put(text, request.headers, _options(request))

    async def on_reload(request: web.Request) -> web.Response:
        return await reload(_options(request))

    async def on_rollback(request: web.Request) -> web.Response:
        to = request.query.get("to")
        if to is not None and not (to.isascii() and to.isdigit() and len(to) < 10):
            return _malformed("to= must be the number of a version")
        return await rollback(int(to) if to is not None else None, _options(request))

    routes.add_put("/config", on_put)
    routes.add_post("/config/reload", on_reload)
    routes.add_post("/config/rollback", on_rollback)


def _malformed(message: str, status: int = 400) -> web.Response:
    reply = {
        "result": "rejected",
        "message": message,
        "changes": [],
        "problems": [],
        "needs_restart": [],
    }
    return web.json_response(reply, status=status)


def _options(request: web.Request) -> ChangeOptions:
    is_trusted = is_supervisor(request)
    return ChangeOptions(
        dry_run=_has_flag(request, "dry_run"),
        records_rejection=_has_flag(request, "record_rejection"),
        force=_has_flag(request, "force"),
        was_in_force=_has_flag(request, "was_in_force") and is_trusted,
        trigger=request.query.get("trigger", "") if is_trusted else "",
        reason=request.query.get("reason", "") if is_trusted else "",
    )


def _has_flag(request: web.Request, flag: str) -> bool:
    return request.query.get(flag, "0").lower() not in ("0", "false", "no")


def _state(reloader: Reloader) -> dict[str, Any]:
    return {
        "version": reloader.version.number,
        "applied": _version(reloader.version),
        "last_error": _rejection(reloader.last_error),
        "needs_restart": list(reloader.needs_restart),
    }


def _certificates(loaded: LoadedConfig) -> list[dict[str, Any]]:
    # Return the expiry of each certificate file, and why peers refuse it now, if they do.
    return [
        {
            "path": certificate.path,
            "file": loaded.resolved.hide(certificate.file),
            "not_after": _time(certificate.not_after),
            "problem": certificate.refusal_reason,
        }
        for certificate in named_certificates(loaded.config, time())
    ]


def _response(outcome: ReloadOutcome) -> web.Response:
    reply = {
        "result": outcome.result,
        "message": outcome.message,
        "version": outcome.version.number,
        "changes": [_change(change) for change in outcome.changes],
        "problems": [_problem(problem) for problem in outcome.problems],
        "needs_restart": list(outcome.needs_restart),
        "affected": outcome.affected,
        "took_ms": round(outcome.took_s * 1000, 3),
    }
    headers = {"ETag": outcome.version.etag}
    return web.json_response(reply, status=STATUS[outcome.result], headers=headers)


def _version(version: Version) -> dict[str, Any]:
    # Return a version's number, hash, time, source and changes as JSON values.
    #
    # The configuration text is left out, because it may contain a secret.
    return {
        "version": version.number,
        "hash": version.hash,
        "etag": version.etag,
        "at": _time(version.at),
        "source": version.trigger,
        "reason": version.reason,
        "file": version.file,
        "changes": [_change(change) for change in version.changes],
    }


def _change(change: ConfigChange) -> dict[str, Any]:
    return {
        "path": change.path,
        "before": change.before,
        "after": change.after,
        "text": str(change),
    }


def _rejection(rejection: Rejection | None) -> dict[str, Any] | None:
    if rejection is None:
        return None
    problems = [_problem(problem) for problem in rejection.problems]
    return {"at": _time(rejection.at), "source": rejection.trigger, "problems": problems}


def _problem(problem: Problem) -> dict[str, Any]:
    fields = {name: getattr(problem, name) for name in problem.__struct_fields__}
    return fields | {"text": str(problem)}


def _time(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    return text.replace("+00:00", "Z")
