"""The API listener's ordinary requests: the model list, and an OpenAI-shaped refusal for everything unknown.

Generation requests never come here: gateway/front.py serves them, or lobby.py right behind aiohttp's parser.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import time
from typing import TYPE_CHECKING

from aiohttp import web

from gateway.answer import Failure, GatewayError, body_of, headers_of, new_id
from gateway.openai import LINE

if TYPE_CHECKING:
    from gateway.app import App

SERVER = "penstock"  # aiohttp would name itself and its version
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(app: App) -> web.Application:
    """GET /v1/models and /v1/models/{id}; 405 for a known path with another method; 404 for the rest."""
    created = int(time())

    async def models(request: web.Request) -> web.StreamResponse:
        snapshot = app.gateway.snapshot
        snapshot.authenticate(request.headers)
        names = sorted(snapshot.routes)
        return _found({"object": "list", "data": [_card(name, app, created) for name in names]})

    async def model(request: web.Request) -> web.StreamResponse:
        snapshot = app.gateway.snapshot
        snapshot.authenticate(request.headers)
        name = request.match_info["name"]
        if name not in snapshot.routes:
            message = snapshot.unlisted.get(name, f"The model {name[:64]!r} does not exist.")
            raise GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")
        return _found(_card(name, app, created))

    server = web.Application(middlewares=[_refusals])
    server.router.add_get("/v1/models", models, allow_head=False)
    server.router.add_get("/v1/models/{name:.+}", model, allow_head=False)
    return server


def _card(name: str, app: App, created: int) -> dict[str, object]:
    route = app.gateway.snapshot.routes[name]
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "root": route.name,
        "max_model_len": route.context_tokens,
    }


def _found(answer: dict[str, object]) -> web.Response:
    return web.json_response(answer, headers={"server": SERVER, "x-request-id": new_id()})


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """aiohttp's own 404 and 405, and ours, in OpenAI's shape."""
    try:
        return await handler(request)
    except GatewayError as error:
        return _refused(error)
    except web.HTTPMethodNotAllowed as problem:
        return _refused(_method(request, sorted(problem.allowed_methods)))
    except web.HTTPNotFound:
        if request.rel_url.raw_path in LINE:
            return _refused(_method(request, ["POST"]))
        path = request.path[:64].encode("ascii", "backslashreplace").decode()
        return _refused(GatewayError(Failure.NOT_FOUND, f"Unknown request URL: {request.method} {path}."))


def _method(request: web.Request, allowed: list[str]) -> GatewayError:
    names = ", ".join(allowed)
    return GatewayError(Failure.METHOD_NOT_ALLOWED, f"Not allowed here: {request.method}. Allowed: {names}.")


def _refused(error: GatewayError) -> web.Response:
    return web.Response(
        status=error.status,
        body=body_of(error),
        content_type="application/json",
        headers=[("server", SERVER), ("x-request-id", new_id()), *headers_of(error)],
    )
