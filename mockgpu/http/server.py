"""The HTTP server of one mock engine, with vLLM's API: routes, errors, and faults of requests.

A handler parses a request, submits its choices to the engine (TpGroup), and waits for the result. A
client that disconnects cancels its handler, which aborts its jobs.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from mockgpu.engine_formats import (
    EngineFormat,
    engine_of,
    error_body,
    request_schemas,
    with_extra_key,
)
from mockgpu.fault_grammar import (
    BREAKING_FAULTS,
    KV_FAULTS,
    STREAM_FAULTS,
    FaultKind,
    InjectedFault,
)
from mockgpu.group import TokenSink, TpGroup
from mockgpu.group_faults import GroupFaults
from mockgpu.http import audio_format, messages_format, openai_format, pooling
from mockgpu.http.choice import Choice, build_choices
from mockgpu.http.control_pages import ControlPages
from mockgpu.http.handler_helpers import (
    JSON,
    break_whole,
    check_content_type,
    form_fields,
    json_answer,
    reset_now,
    transport_of,
)
from mockgpu.http.kv_event_pages import KvEventPages
from mockgpu.http.named_events import EventChunks, NamedEventFormat, read_members
from mockgpu.http.response_sinks import (
    FaultySink,
    PendingResponse,
    StreamSink,
    WholeSink,
)
from mockgpu.http.responses_format import ResponsesFormat
from mockgpu.http.responses_store import ResponsesStore
from mockgpu.mock_tokenizer import token_count
from mockgpu.request_parser import (
    NO_LEG,
    ApiError,
    MalformedHandoffError,
    ParsedHandoff,
    ParsedRequest,
    RequestBody,
    chat_prompt,
    check_context,
    check_handoff,
    client_request_id,
    decode_body,
    parse_prompt,
    parse_request,
)
from mockgpu.split_legs import DecodeLeg, PrefillLeg

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.pd_role import PdRole

VERSION = "0.33.0"
MAX_BODY_BYTES = 32 << 20
EVENT_STREAM = "text/event-stream; charset=utf-8"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MockServer:
    """The HTTP routes of one mock engine, and its injected faults.

    `pd_role` is its half of split (prefill/decode) requests; None if it serves whole requests only.
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
        self._formats: Mapping[str, NamedEventFormat] = {
            "/v1/messages": messages_format.MessagesFormat(),
            "/v1/responses": ResponsesFormat(self._stored),
        }

    def app(self, *further: Middleware) -> web.Application:
        """Return the aiohttp application, to be served with `handler_cancellation=True`.

        The middlewares in `further` run inside the one that answers errors.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors, *further])
        missing = tuple(f"/v1/{name}" for name in self.group.spec.lacks)
        routes = [route for route in self._routes() if not _is_below(route.path, missing)]
        app.add_routes([*routes, *self._control_pages.routes()])
        app.router.add_get("/mock/kv_blocks", self._kv_event_pages.blocks)
        return app

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.get("/v1/models", self.models),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post("/v1/messages/count_tokens", self.count_tokens),
            web.post("/v1/audio/transcriptions", self.listen),
            web.post("/v1/audio/translations", self.listen),
            *(web.post(path, self.converse) for path in self._formats),
            *self._kv_event_pages.engine_routes(),
            *(web.post(path, self.pool) for path in pooling.READERS),
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
        # Middleware that returns every error in the imitated engine's format.
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
        form = self._formats.get(request.path.removesuffix("/count_tokens"))
        body = error_body(api_error, self._engine) if form is None else form.error(api_error)
        return web.Response(status=api_error.status, body=body, content_type=JSON)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Serve POST /v1/chat/completions, as a stream or as a whole response."""
        return await self._generate(request, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Serve POST /v1/completions, as a stream or as a whole response."""
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, chat: bool) -> web.StreamResponse:
        fault = self._pick_fault(request)
        parsed = await self._read(request, chat)
        if fault is not None and fault.kind is FaultKind.ERROR:
            raise ApiError(fault.status, "Injected fault")
        choices = build_choices(parsed)
        if parsed.leg is not None and len(choices) > 1:
            self.group.metrics.malformed_handoffs += 1
            raise MalformedHandoffError(f"{len(choices)} sequences, but one is allowed")
        answer = PendingResponse(len(choices), asyncio.get_running_loop())
        if parsed.is_stream:
            return await self._stream(request, parsed, choices, answer, fault)
        return await self._serve_whole(request, parsed, choices, answer, fault)

    def _pick_fault(self, request: web.Request) -> InjectedFault | None:
        # Return the fault of this request; apply it now if it precedes the response.
        fault = self.faults.pick_fault()
        if fault is not None and fault.kind is FaultKind.RESET_BEFORE_HEADERS:
            reset_now(request)
        return fault

    async def converse(self, request: web.Request) -> web.StreamResponse:
        """Serve a POST to the Messages or the Responses API, whole or as a stream.

        The mock converts the request to a chat request, and the generated text back.
        """
        form, fault = self._formats[request.path], self._pick_fault(request)
        check_content_type(request)
        raw = await request.read()
        members = read_members(raw)
        name = client_request_id(request.headers) or uuid.uuid4().hex
        request_id = str(members.get("request_id") or form.prefix + name)
        parsed = self._parse(raw, form.read(members), request, request_id, True)
        if fault is not None and fault.kind is FaultKind.ERROR:
            raise ApiError(fault.status, "Injected fault")
        (choice,) = build_choices(parsed)
        if parsed.is_stream:
            chunks = form.chunks(parsed, choice, int(time.time()), members)
            return await self._stream_events(request, form, chunks, choice, fault)
        answer = PendingResponse(1, asyncio.get_running_loop())
        with self._submitted([choice], [WholeSink(answer)], fault):
            error = await answer.done
        if error is not None:
            raise error
        body = form.whole(parsed, choice, int(time.time()), self._cached(parsed, [choice]), members)
        if fault is not None and fault.kind in BREAKING_FAULTS:
            await break_whole(request, msgspec.json.encode(body), fault.kind)
        return json_answer(body)

    async def listen(self, request: web.Request) -> web.StreamResponse:
        """Serve POST /v1/audio/transcriptions and /v1/audio/translations of a recording."""
        fault = self._pick_fault(request)
        fields = await form_fields(request)
        name = client_request_id(request.headers) or uuid.uuid4().hex
        parsed = self._parse(b"{}", audio_format.read_audio(fields), request, f"trsc-{name}", True)
        if fault is not None and fault.kind is FaultKind.ERROR:
            raise ApiError(fault.status, "Injected fault")
        (choice,) = build_choices(parsed)
        if parsed.is_stream:
            chunks = audio_format.AudioChunks(parsed, choice, int(time.time()))
            return await self._stream_events(request, None, chunks, choice, fault)
        answer = PendingResponse(1, asyncio.get_running_loop())
        with self._submitted([choice], [WholeSink(answer)], fault):
            error = await answer.done
        if error is not None:
            raise error
        return json_answer(audio_format.transcription(parsed, choice))

    async def _stream_events(
        self,
        request: web.Request,
        form: NamedEventFormat | None,
        chunks: EventChunks,
        choice: Choice,
        fault: InjectedFault | None,
    ) -> web.StreamResponse:
        answer, transport = PendingResponse(1, asyncio.get_running_loop()), transport_of(request)
        details, job = self.group.spec.cached_details, choice.job
        sink = StreamSink(answer, chunks, job, transport, details)
        if fault is not None and fault.kind in STREAM_FAULTS:
            sink = FaultySink(answer, chunks, job, transport, details, fault)
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
        response.enable_chunked_encoding()
        with self._submitted([choice], [sink], fault):
            await response.prepare(request)
            if fault is not None and fault.kind is FaultKind.RESET_AFTER_HEADERS:
                reset_now(request)
            transport.write(chunks.begin())
            error = await answer.done
        if transport.is_closing():
            raise asyncio.CancelledError
        cached = max(0, job.cached) if details else None
        transport.write(chunks.end(cached) if error is None else self._failure(form, error))
        await response.write_eof()
        return response

    def _failure(self, form: NamedEventFormat | None, error: ApiError) -> bytes:
        if form is not None:
            return form.failure(error)
        return openai_format.stream_error(error_body(error, self._engine, streaming=True))

    async def stored_response(self, request: web.Request) -> web.Response:
        """Serve GET /v1/responses/{id}: the stored response with this id."""
        return json_answer(self._stored.find(request.match_info["id"]).response)

    async def delete_response(self, request: web.Request) -> web.Response:
        """Serve DELETE /v1/responses/{id}, which vLLM does not have."""
        return json_answer(self._stored.delete(request.match_info["id"]))

    async def cancel_response(self, request: web.Request) -> web.Response:
        """Serve POST /v1/responses/{id}/cancel: always an error, as nothing runs in background."""
        self._stored.find(request.match_info["id"])
        raise ApiError(400, "Cannot cancel a synchronous response.", "response_id")

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Serve POST /v1/messages/count_tokens: the number of tokens of a Messages request."""
        chat = messages_format.count_body(read_members(await request.read()))
        return json_answer({"input_tokens": token_count(chat_prompt(chat))})

    async def _serve_whole(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        choices: list[Choice],
        answer: PendingResponse,
        fault: InjectedFault | None,
    ) -> web.Response:
        stalled = fault is not None and fault.kind is FaultKind.STALL
        with self._submitted(choices, [WholeSink(answer, stalled) for _ in choices], fault):
            error = await answer.done
        if error is not None:
            raise error
        body = openai_format.full_response(
            parsed,
            choices,
            int(time.time()),
            self._cached(parsed, choices),
            self._extras(parsed, choices[0]),
        )
        if fault is not None and fault.kind in BREAKING_FAULTS:
            await break_whole(request, body, fault.kind)
        return web.Response(body=body, content_type=JSON)

    @contextmanager
    def _submitted(
        self, choices: Sequence[Choice], sinks: Sequence[TokenSink], fault: InjectedFault | None
    ) -> Iterator[None]:
        # Run the jobs of these choices during a `with` block, and abort them at its end.
        #
        # A KV fault hits the first choice.
        try:
            if fault is not None and fault.kind in KV_FAULTS:
                self.group.mark_fault(choices[0].job, fault)
            for choice, sink in zip(choices, sinks, strict=True):
                if self.group.memory is not None:
                    choice.job.content = choice
                if self.group.reads_tokens:
                    choice.describe_job()
                self.group.submit(choice.job, sink, choice.finish_reason)
            yield
        finally:
            for choice in choices:
                self.group.abort(choice.job)

    async def _read(self, request: web.Request, chat: bool) -> ParsedRequest:
        # Parse a request. If a decode request is refused, let the prefill engine free its KV.
        check_content_type(request)
        raw = await request.read()
        name = client_request_id(request.headers) or uuid.uuid4().hex
        request_id = f"chatcmpl-{name}" if chat else f"cmpl-{name}"
        body = decode_body(raw, RequestBody)
        return self._parse(raw, body, request, request_id, chat)

    def _parse(
        self, raw: bytes, body: RequestBody, request: web.Request, request_id: str, chat: bool
    ) -> ParsedRequest:
        reading = self._reading(raw, body, request, request_id)
        spec = self.group.spec
        try:
            parsed = parse_request(
                *(body, request.headers, chat, spec.served_name, spec.context, request_id),
                reading,
                *(spec.may_end_from, spec.answer_noise),
            )
            return with_extra_key(parsed) if self._engine is EngineFormat.SGLANG else parsed
        except ApiError:
            if isinstance(reading.leg, DecodeLeg) and self.group.kv_handoff is not None:
                self.group.kv_handoff.decline(reading.leg)
            raise

    def _reading(
        self, raw: bytes, body: RequestBody, request: web.Request, request_id: str
    ) -> ParsedHandoff:
        # Parse the handoff fields of a request. An engine without a P/D role refuses them.
        if self.pd_role is not None:
            return self.pd_role.read(raw, body, request.headers, request_id)
        try:
            check_handoff(body, request.headers)
        except MalformedHandoffError:
            self.group.metrics.malformed_handoffs += 1
            raise
        return NO_LEG

    def _extras(self, parsed: ParsedRequest, choice: Choice) -> openai_format.ResponseExtras:
        if self.pd_role is None or not isinstance(parsed.leg, PrefillLeg):
            return openai_format.NO_EXTRAS
        offered, speaks, here = choice.job.offered, self.pd_role.dialect, self.pd_role.identity
        inside = speaks.choice_members(parsed, offered, choice.tokens, here)
        return openai_format.ResponseExtras(
            speaks.response_members(parsed, parsed.leg, offered, here), inside
        )

    async def _stream(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        choices: list[Choice],
        answer: PendingResponse,
        fault: InjectedFault | None,
    ) -> web.StreamResponse:
        created = int(time.time())
        transport = transport_of(request)
        sinks = [
            self._sink(parsed, choice, created, answer, transport, fault) for choice in choices
        ]
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
        response.enable_chunked_encoding()
        with self._submitted(choices, sinks, fault):
            await response.prepare(request)
            if fault is not None and fault.kind is FaultKind.RESET_AFTER_HEADERS:
                reset_now(request)
            error = await answer.done
        if transport.is_closing():
            raise asyncio.CancelledError
        if error is None:
            transport.write(
                openai_format.stream_end(parsed, choices, created, self._cached(parsed, choices))
            )
        else:
            transport.write(
                openai_format.stream_error(error_body(error, self._engine, streaming=True))
            )
        await response.write_eof()
        return response

    def _sink(
        self,
        parsed: ParsedRequest,
        choice: Choice,
        created: int,
        answer: PendingResponse,
        transport: asyncio.Transport,
        fault: InjectedFault | None,
    ) -> StreamSink:
        chunks = openai_format.StreamChunks(parsed, choice, created)
        details = self.group.spec.cached_details
        if fault is not None and fault.kind in STREAM_FAULTS:
            return FaultySink(answer, chunks, choice.job, transport, details, fault)
        return StreamSink(answer, chunks, choice.job, transport, details)

    def _cached(self, parsed: ParsedRequest, choices: list[Choice]) -> int | None:
        # Return the cached prompt tokens for `usage`; None if the engine reports none.
        return (
            openai_format.cached_tokens(choices, parsed.n)
            if self.group.spec.cached_details
            else None
        )

    async def models(self, _: web.Request) -> web.Response:
        """Serve GET /v1/models: the list of the engine's only model."""
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
        """Serve POST /tokenize: the token ids of a chat or a prompt."""
        prompt = parse_prompt(await request.read())
        return web.Response(
            body=openai_format.tokenize_response(prompt, self.group.spec.context), content_type=JSON
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """Serve POST /detokenize: convert token ids to text."""
        return json_answer(pooling.detokenize(await request.read()))

    async def pool(self, request: web.Request) -> web.Response:
        """Serve a POST to an API that generates no text, in the time that its prefill takes."""
        fault = self._pick_fault(request)
        check_content_type(request)
        name = client_request_id(request.headers) or uuid.uuid4().hex
        read = pooling.READERS[request.path]
        job = read(await request.read(), request.headers, self.group.spec.served_name, name)
        if fault is not None and fault.kind is FaultKind.ERROR:
            raise ApiError(fault.status, "Injected fault")
        check_context(job.parsed.prompts, self.group.spec.context)
        choices = build_choices(job.parsed)
        answer = PendingResponse(len(choices), asyncio.get_running_loop())
        with self._submitted(choices, [WholeSink(answer) for _ in choices], fault):
            error = await answer.done
        if error is not None:
            raise error
        return json_answer(job.build(int(time.time())))

    async def health(self, _: web.Request) -> web.Response:
        """Serve GET /health: 503 if the engine is dead, 200 otherwise, even if it hangs."""
        return web.Response(status=503 if self.group.is_dead and not self.group.is_hanging else 200)

    async def load(self, _: web.Request) -> web.Response:
        """Serve GET /load: the number of requests in progress, as vLLM reports it."""
        return json_answer({"server_load": self.group.in_flight})

    async def version(self, _: web.Request) -> web.Response:
        """Serve GET /version: the version of the imitated engine."""
        return json_answer({"version": self._version})

    async def openapi(self, request: web.Request) -> web.Response:
        """Serve GET /openapi.json: the paths, and the members that requests may have."""
        paths: dict[str, dict[str, Any]] = {
            resource.canonical: {} for resource in request.app.router.resources()
        }
        components = {"schemas": request_schemas(self._engine)}
        page = {"openapi": "3.1.0", "paths": paths, "components": components}
        return json_answer(page)

    async def metrics(self, _: web.Request) -> web.Response:
        """Serve GET /metrics: the engine's metrics in Prometheus text format."""
        text = self.group.metrics.render(self.group.scheduler, self.group.kv_handoff, self._engine)
        return web.Response(
            body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )


def _is_below(path: str, parents: tuple[str, ...]) -> bool:
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)
