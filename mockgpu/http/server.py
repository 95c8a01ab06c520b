"""The routes of a mock engine's HTTP server, and its short handlers: models, tokenize, version.

generation_handlers.py has the handlers of requests that the engine computes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from mockgpu.engine_formats import (
    engine_of,
    error_body,
    request_schemas,
)
from mockgpu.group_faults import GroupFaults
from mockgpu.http import messages_format, openai_format, pooling
from mockgpu.http.background_responses import send_events
from mockgpu.http.chat_conversion import read_members
from mockgpu.http.control_pages import ControlPages
from mockgpu.http.generation_handlers import GenerationHandlers
from mockgpu.http.handler_helpers import (
    JSON,
    json_answer,
)
from mockgpu.http.kv_event_pages import KvEventPages
from mockgpu.http.responses_store import ResponsesStore
from mockgpu.mock_tokenizer import token_count
from mockgpu.request_parser import (
    ApiError,
    chat_prompt,
    parse_prompt,
)
from mockgpu.tp_group import TpGroup

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.prefill_decode_role import PdRole

VERSION = "0.33.0"
MAX_BODY_BYTES = 32 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MockServer:
    """The HTTP routes of one mock engine, and its injected faults.

    pd_role     serves one half (prefill or decode) of split requests; None if the engine serves
                only whole requests
    generation  the handlers of requests that the engine computes
    """

    def __init__(self, group: TpGroup, faults: GroupFaults, half: PdRole | None = None) -> None:
        self.group = group
        self.faults = faults
        self.pd_role = half
        transfer = group.spec.transfer
        self._engine = engine_of(transfer.dialect if transfer is not None else None)
        self._version = (
            VERSION if transfer is None else f"{transfer.version[0]}.{transfer.version[1]}.0"
        )
        self._created = int(time.time())
        self._kv_event_pages = KvEventPages(group, self._engine)
        self._control_pages = ControlPages(group, faults, half)
        self._stored = ResponsesStore(group.spec.stores_responses)
        self.generation = GenerationHandlers(group, faults, half, self._engine, self._stored)

    def app(self, *further: Middleware) -> web.Application:
        """Return the aiohttp application. Serve it with `handler_cancellation=True`.

        The middlewares in `further` are called inside the one that converts errors to responses.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors, *further])
        missing = tuple(f"/v1/{name}" for name in self.group.spec.lacks)
        routes = [route for route in self._routes() if not _is_below(route.path, missing)]
        app.add_routes([*routes, *self._control_pages.routes()])
        app.router.add_get("/mock/kv_blocks", self._kv_event_pages.blocks)
        return app

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.generation.chat),
            web.post("/v1/completions", self.generation.completions),
            web.get("/v1/models", self.models),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post("/v1/messages/count_tokens", self.count_tokens),
            web.post("/v1/audio/transcriptions", self.generation.listen),
            web.post("/v1/audio/translations", self.generation.listen),
            *(web.post(path, self.generation.converse) for path in self.generation.formats),
            *self._kv_event_pages.engine_routes(),
            *(web.post(path, self.generation.pool) for path in pooling.READERS),
            web.get("/health", self.health),
            web.get("/ping", self.health),
            web.post("/ping", self.health),
            web.get("/load", self.load),
            web.get("/version", self.version),
            web.get("/openapi.json", self.openapi),
            web.get("/metrics", self.metrics),
            web.get("/prometheus/metrics", self.metrics),
            web.get("/v1/responses/{id}", self.stored_response),
            web.delete("/v1/responses/{id}", self.delete_response),
            web.post("/v1/responses/{id}/cancel", self.cancel_response),
        ]

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # Return every error in the format of the imitated engine. This is an aiohttp middleware.
        #
        # During a partition fault only routes under /mock/ respond.
        if not request.path.startswith("/mock/"):
            await self.faults.wait_reachable()
        try:
            return await handler(request)
        except web.HTTPException as error:
            api_error = ApiError(error.status, error.reason)
        except ApiError as error:
            api_error = error
        except ConnectionResetError:  # the client left before its response began
            raise asyncio.CancelledError from None
        form = self.generation.formats.get(request.path.removesuffix("/count_tokens"))
        body = error_body(api_error, self._engine) if form is None else form.error(api_error)
        return web.Response(
            status=api_error.status, body=body, content_type=JSON, headers=api_error.headers
        )

    async def stored_response(self, request: web.Request) -> web.StreamResponse:
        """Serve GET /v1/responses/{id}: the stored response with this id.

        With the query `stream=true`, the result is the stream of a background response. It begins
        after event number `starting_after`.
        """
        response_id = request.match_info["id"]
        run = self._stored.run_of(response_id)
        if run is None or request.query.get("stream") != "true":
            return json_answer(self._stored.find(response_id).response)
        return await send_events(request, run, int(request.query.get("starting_after", -1)) + 1)

    async def delete_response(self, request: web.Request) -> web.Response:
        """Serve DELETE /v1/responses/{id}, a route that OpenAI's API has and vLLM lacks."""
        return json_answer(self._stored.delete(request.match_info["id"]))

    async def cancel_response(self, request: web.Request) -> web.Response:
        """Serve POST /v1/responses/{id}/cancel: stop a response that runs in the background."""
        run = self._stored.run_of(request.match_info["id"])
        if run is None:
            raise ApiError(400, "Cannot cancel a synchronous response.", "response_id")
        return json_answer(run.cancel())

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Serve POST /v1/messages/count_tokens: the number of prompt tokens of a Messages
        request.
        """
        chat = messages_format.count_body(read_members(await request.read()))
        return json_answer({"input_tokens": token_count(chat_prompt(chat))})

    async def models(self, _: web.Request) -> web.Response:
        """Serve GET /v1/models: a list with the one model that this engine serves."""
        spec = self.group.spec
        card = {
            "id": spec.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": spec.model.name,
            "parent": None,
            "max_model_len": spec.context,
            "permission": [],
        }
        return json_answer({"object": "list", "data": [card]})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Serve POST /tokenize: the token ids of a prompt or of a rendered chat."""
        prompt = parse_prompt(await request.read())
        return web.Response(
            body=openai_format.tokenize_response(prompt, self.group.spec.context), content_type=JSON
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """Serve POST /detokenize, which converts token ids to text."""
        return json_answer(pooling.detokenize(await request.read()))

    async def health(self, _: web.Request) -> web.Response:
        """Serve GET /health: status 503 if the engine is dead, otherwise 200, even if it hangs."""
        return web.Response(status=503 if self.group.is_dead and not self.group.is_hanging else 200)

    async def load(self, _: web.Request) -> web.Response:
        """Serve GET /load: the number of requests in progress, as vLLM reports it."""
        return json_answer({"server_load": self.group.in_flight})

    async def version(self, _: web.Request) -> web.Response:
        """Serve GET /version, which reports the version of the imitated engine."""
        return json_answer({"version": self._version})

    async def openapi(self, request: web.Request) -> web.Response:
        """Serve GET /openapi.json: the paths of the API, and the fields that requests may have."""
        paths: dict[str, dict[str, Any]] = {
            resource.canonical: {} for resource in request.app.router.resources()
        }
        components = {"schemas": request_schemas(self._engine)}
        page = {"openapi": "3.1.0", "paths": paths, "components": components}
        return json_answer(page)

    async def metrics(self, _: web.Request) -> web.Response:
        """Serve GET /metrics, the engine's metrics in Prometheus text format."""
        text = self.group.metrics.render(self.group.scheduler, self.group.kv_handoff, self._engine)
        return web.Response(
            body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )


def _is_below(path: str, parents: tuple[str, ...]) -> bool:
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)
