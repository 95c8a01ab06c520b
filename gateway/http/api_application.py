"""The aiohttp application of the API listener: lists of models, health, CORS, and wrong URLs.

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
from gateway.http.url_errors import SERVER_NAME, error_middleware
from gateway.protocol.cors import CorsRule
from gateway.protocol.error_formats import ANTHROPIC, OPENAI, ErrorFormat
from gateway.protocol.errors import Failure, GatewayError, new_request_id
from gateway.protocol.model_cards import (
    ListedModel,
    anthropic_card,
    anthropic_list,
    openai_card,
    openai_list,
    wants_anthropic,
)

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
            return _ok(anthropic_list(routes, created, request.query), ANTHROPIC)
        return _ok(openai_list(routes, created))

    async def show_model(request: web.Request) -> web.StreamResponse:
        models, name = scope(request), request.match_info["name"]
        try:
            model = models.routes[name]
        except KeyError:
            raise _unknown(models, name) from None
        if wants_anthropic(request.headers):
            return _ok(anthropic_card(name, model, created), ANTHROPIC)
        return _ok(openai_card(name, model, created))

    server = web.Application(middlewares=[_cors_middleware(cors), error_middleware])
    server.router.add_get("/v1/models", list_models)
    server.router.add_get("/v1/models/{name:.+}", show_model)
    add_health(server.router, _common_headers)
    return server


def _unknown(models: ModelNames, name: str) -> GatewayError:
    message = f"The model {name[:64]!r} does not exist."
    with suppress(KeyError):
        message = models.unlisted[name]
    return GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")


def _ok(body: dict[str, object], shape: ErrorFormat = OPENAI) -> web.Response:
    return web.json_response(body, headers=_common_headers(shape))


def _common_headers(shape: ErrorFormat = OPENAI) -> dict[str, str]:
    return {"server": SERVER_NAME, **dict(shape.id_headers(new_request_id()))}


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
