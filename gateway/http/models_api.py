"""The API listener's non-generation requests: the model list, and OpenAI-shaped errors.

Generation requests never arrive here; the client connections serve them directly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from time import time
from typing import Protocol

from aiohttp import web

from gateway.protocol.errors import Failure, GatewayError, error_body, new_request_id, retry_headers
from gateway.protocol.openai import GENERATION_PATHS

SERVER_NAME = "penstock"  # replaces aiohttp's own name and version
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ListedModel(Protocol):
    """A model as its card shows it. `context_tokens` is None when the limit is unknown."""

    @property
    def name(self) -> str: ...

    @property
    def context_tokens(self) -> int | None: ...


class ModelCatalogue(Protocol):
    """The models of one configuration, by every name that clients may use."""

    @property
    def routes(self) -> Mapping[str, ListedModel]: ...

    @property
    def unlisted(self) -> Mapping[str, str]:
        """The message for every configured name that no endpoint lists."""

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """Return the tenant. Raises GatewayError for a wrong key."""


def api_application(catalogue: Callable[[], ModelCatalogue]) -> web.Application:
    """Create the application: GET /v1/models and /v1/models/{id}, 405 and 404 for the rest.

    `catalogue` returns the models of the running configuration.
    """
    created = int(time())

    async def list_models(request: web.Request) -> web.StreamResponse:
        models = catalogue()
        models.authenticate(request.headers)
        names = sorted(models.routes)
        return _ok(
            {
                "object": "list",
                "data": [_model_card(name, models.routes[name], created) for name in names],
            }
        )

    async def show_model(request: web.Request) -> web.StreamResponse:
        models = catalogue()
        models.authenticate(request.headers)
        name = request.match_info["name"]
        if name not in models.routes:
            message = models.unlisted.get(name, f"The model {name[:64]!r} does not exist.")
            raise GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")
        return _ok(_model_card(name, models.routes[name], created))

    server = web.Application(middlewares=[_openai_errors])
    server.router.add_get("/v1/models", list_models, allow_head=False)
    server.router.add_get("/v1/models/{name:.+}", show_model, allow_head=False)
    return server


def _model_card(name: str, model: ListedModel, created: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "root": model.name,
        "max_model_len": model.context_tokens,
    }


def _ok(body: dict[str, object]) -> web.Response:
    return web.json_response(
        body, headers={"server": SERVER_NAME, "x-request-id": new_request_id()}
    )


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert GatewayError and aiohttp's own 404 and 405 to OpenAI's error shape."""
    try:
        return await handler(request)
    except GatewayError as error:
        return _error(error)
    except web.HTTPMethodNotAllowed as problem:
        return _error(_method_not_allowed(request, sorted(problem.allowed_methods)))
    except web.HTTPNotFound:
        if request.rel_url.raw_path in GENERATION_PATHS:
            return _error(_method_not_allowed(request, ["POST"]))
        path = request.path[:64].encode("ascii", "backslashreplace").decode()
        message = f"Unknown request URL: {request.method} {path}."
        return _error(GatewayError(Failure.NOT_FOUND, message))


def _method_not_allowed(request: web.Request, allowed: list[str]) -> GatewayError:
    names = ", ".join(allowed)
    message = f"Not allowed here: {request.method}. Allowed: {names}."
    return GatewayError(Failure.METHOD_NOT_ALLOWED, message)


def _error(error: GatewayError) -> web.Response:
    return web.Response(
        status=error.status,
        body=error_body(error),
        content_type="application/json",
        headers=[
            ("server", SERVER_NAME),
            ("x-request-id", new_request_id()),
            *retry_headers(error),
        ],
    )
