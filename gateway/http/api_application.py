"""The aiohttp application of the API listener: lists of models, CORS, and the format of errors.

It serves all requests except those to generate an answer, which client connections serve directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from time import time
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.http.health_api import add_health
from gateway.protocol.api_table import API_PATHS, MESSAGES
from gateway.protocol.cors import CorsRule
from gateway.protocol.error_formats import ANTHROPIC, OPENAI
from gateway.protocol.errors import Failure, GatewayError, new_request_id, retry_headers
from gateway.protocol.model_cards import (
    ListedModel,
    anthropic_card,
    anthropic_list,
    openai_card,
    openai_list,
    wants_anthropic,
)

SERVER_NAME = "penstock"  # replaces aiohttp's own name and version
_KNOWN_PATHS = frozenset(API_PATHS) | {"/v1/models"}
CORS_METHODS = ("GET", "HEAD", "POST", "OPTIONS")


class ModelNames(Protocol):
    """The models that one API key may use, by every name that clients may use for them.

    `routes` also resolves names that match a configured pattern.
    """

    @property
    def routes(self) -> Mapping[str, ListedModel]: ...

    @property
    def unlisted(self) -> Mapping[str, str]:
        """Return an error message for each configured model name that no endpoint serves."""


class ModelCatalogue(ModelNames, Protocol):
    """The models of the current configuration, and the API keys that give access to them."""

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """Return the tenant whose API key is in the headers.

        Raises GatewayError if the key is missing or wrong.
        """

    def scope(self, headers: Mapping[str, str]) -> ModelNames:
        """Return the models that the API key in the headers may use. The key must be valid."""


def api_application(
    catalogue: Callable[[], ModelCatalogue], cors: CorsRule | None = None
) -> web.Application:
    """Create the aiohttp application for models, health and version; other paths get 404 or 405.

    catalogue  function that returns the models of the running configuration
    cors       the rule that permits web pages of other origins, and answers their preflight
               requests; None permits no other origin
    """
    created = int(time())

    def scope(request: web.Request) -> ModelNames:
        models = catalogue()
        models.authenticate(request.headers)
        return models.scope(request.headers)

    async def list_models(request: web.Request) -> web.StreamResponse:
        routes = scope(request).routes
        if wants_anthropic(request.headers):
            return _ok(anthropic_list(routes, created, request.query))
        return _ok(openai_list(routes, created))

    async def show_model(request: web.Request) -> web.StreamResponse:
        models, name = scope(request), request.match_info["name"]
        try:
            model = models.routes[name]
        except KeyError:
            raise _unknown(models, name) from None
        card = anthropic_card if wants_anthropic(request.headers) else openai_card
        return _ok(card(name, model, created))

    server = web.Application(middlewares=[_cors_middleware(cors), _openai_errors])
    server.router.add_get("/v1/models", list_models)
    server.router.add_get("/v1/models/{name:.+}", show_model)
    add_health(server.router, _common_headers)
    return server


def _unknown(models: ModelNames, name: str) -> GatewayError:
    message = f"The model {name[:64]!r} does not exist."
    with suppress(KeyError):
        message = models.unlisted[name]
    return GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")


def _ok(body: dict[str, object]) -> web.Response:
    return web.json_response(body, headers=_common_headers())


def _common_headers() -> dict[str, str]:
    return {"server": SERVER_NAME, "x-request-id": new_request_id()}


def _cors_middleware(cors: CorsRule | None) -> Middleware:
    @web.middleware
    async def add_cors(request: web.Request, handler: Handler) -> web.StreamResponse:
        if cors is None:
            return await handler(request)
        preflight = (
            cors.preflight_headers(request.headers, CORS_METHODS)
            if request.method == "OPTIONS"
            else None
        )
        if preflight is not None:
            return web.Response(status=204, headers=[*_common_headers().items(), *preflight])
        response = await handler(request)
        response.headers.extend(cors.response_headers(request.headers))
        return response

    return add_cors


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    # Convert GatewayError and aiohttp's own 404 and 405 to error responses of the client's API.
    try:
        return await handler(request)
    except GatewayError as error:
        return _error(request, error)
    except web.HTTPMethodNotAllowed as problem:
        return _error(request, _method_not_allowed(request, sorted(problem.allowed_methods)))
    except web.HTTPNotFound:
        if request.rel_url.raw_path in API_PATHS:
            return _error(request, _method_not_allowed(request, ["POST"]))
        path = request.path[:64].encode("ascii", "backslashreplace").decode()
        message = f"Unknown request URL: {request.method} {path}.{_hint(request.rel_url.raw_path)}"
        return _error(request, GatewayError(Failure.NOT_FOUND, message))


def _hint(path: str) -> str:
    # Return the known path that was probably meant, as a sentence.
    #
    # The base URL of some clients ends with /v1, that of others must not. A final slash is doubled.
    meant = "/" + "/".join(part for part in path.split("/") if part)
    while meant.startswith("/v1/v1/"):
        meant = meant.removeprefix("/v1")
    likely = (meant, f"/v1{meant}", meant.removeprefix("/v1"))
    known = next((name for name in likely if name in _KNOWN_PATHS), None)
    return "" if known is None else f" Did you mean {known}? Check the client's base URL."


def _method_not_allowed(request: web.Request, allowed: list[str]) -> GatewayError:
    names = ", ".join(allowed)
    message = f"The method {request.method} is not allowed here. Allowed: {names}."
    return GatewayError(Failure.METHOD_NOT_ALLOWED, message, headers=(("allow", names),))


def _error(request: web.Request, error: GatewayError) -> web.Response:
    # Return the response for an error, in the format of the client's API (OpenAI or Anthropic).
    request_id = new_request_id()
    path = request.rel_url.raw_path
    shape = API_PATHS[path].errors if path in API_PATHS else OPENAI
    if path.startswith(f"{MESSAGES.path}/") or wants_anthropic(request.headers):
        shape = ANTHROPIC
    return web.Response(
        status=error.status,
        body=shape.body(error, request_id),
        content_type="application/json",
        headers=[("server", SERVER_NAME), ("x-request-id", request_id), *retry_headers(error)],
    )
