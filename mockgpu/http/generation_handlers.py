"""HTTP handlers that parse a request, submit its jobs, and send the answer: chats, pooling, audio.

A handler parses the request, submits one job per choice to the engine (TpGroup), and waits for the
result. fault_answers.py has the answers to requests that an injected fault affects. If the client
disconnects, aiohttp cancels the handler, and the handler aborts its jobs.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from mockgpu.engine_formats import (
    EngineFormat,
    error_body,
    with_extra_key,
)
from mockgpu.fault_grammar import (
    BREAKING_FAULTS,
    KV_FAULTS,
    STREAM_FAULTS,
    FaultKind,
    InjectedFault,
)
from mockgpu.generation_log import GenerationLog
from mockgpu.group_faults import GroupFaults
from mockgpu.http import audio_format, messages_format, openai_format, pooling
from mockgpu.http.background_responses import (
    EVENT_STREAM,
    BackgroundRun,
    RecordingSink,
    send_events,
)
from mockgpu.http.chat_conversion import read_members
from mockgpu.http.choice_and_stop_reason import Choice, build_choices
from mockgpu.http.fault_answers import break_whole, raise_injected, reset_now
from mockgpu.http.handler_helpers import (
    JSON,
    check_content_type,
    form_fields,
    json_answer,
    transport_of,
)
from mockgpu.http.named_events import EventChunks, NamedEventFormat
from mockgpu.http.response_sinks import (
    FaultySink,
    PendingResponse,
    StreamSink,
    WholeSink,
)
from mockgpu.http.responses_format import ResponsesFormat
from mockgpu.http.responses_store import ResponsesStore
from mockgpu.request_parser import (
    NO_LEG,
    ApiError,
    MalformedHandoffError,
    ParsedHandoff,
    ParsedRequest,
    RequestBody,
    check_context,
    check_handoff,
    client_request_id,
    decode_body,
    parse_request,
)
from mockgpu.split_legs import DecodeLeg, PrefillLeg
from mockgpu.tp_group import TokenSink, TpGroup

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.prefill_decode_role import PdRole


class GenerationHandlers:
    """The HTTP handlers of one mock engine for requests that it computes: chats, embeddings, audio.

    `formats` maps the path of an API with named stream events (Messages, Responses) to its
    converter.
    """

    def __init__(
        self,
        group: TpGroup,
        faults: GroupFaults,
        half: PdRole | None,
        engine: EngineFormat,
        stored: ResponsesStore,
    ) -> None:
        self.group, self.faults, self.pd_role = group, faults, half
        self._engine = engine
        path = group.spec.generation_log
        self._log = None if path is None else GenerationLog(path)
        self.formats: Mapping[str, NamedEventFormat] = {
            "/v1/messages": messages_format.MessagesFormat(),
            "/v1/responses": ResponsesFormat(stored),
        }

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Serve POST /v1/chat/completions; the answer is a stream if the request asks for one."""
        return await self._generate(request, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Serve POST /v1/completions; the answer is a stream if the request asks for one."""
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, chat: bool) -> web.StreamResponse:
        fault = self._pick_fault(request)
        parsed = await self._read(request, chat)
        raise_injected(fault)
        choices = build_choices(parsed)
        if parsed.leg is not None and len(choices) > 1:
            self.group.metrics.malformed_handoffs += 1
            raise MalformedHandoffError(
                f"a split request must have one choice, but n and the prompts make {len(choices)}"
            )
        answer = PendingResponse(len(choices), asyncio.get_running_loop())
        if parsed.is_stream:
            return await self._stream(request, parsed, choices, answer, fault)
        return await self._serve_whole(request, parsed, choices, answer, fault)

    async def converse(self, request: web.Request) -> web.StreamResponse:
        """Serve a POST to the Messages or the Responses API, as a stream or a complete response.

        The request is converted to a chat request, and the generated text is converted back.
        """
        form, fault = self.formats[request.path], self._pick_fault(request)
        check_content_type(request)
        raw = await request.read()
        members = read_members(raw)
        name = client_request_id(request.headers) or uuid.uuid4().hex
        request_id = str(members.get("request_id") or form.prefix + name)
        parsed = self._parse(raw, form.read(members), request, request_id, True)
        raise_injected(fault)
        (choice,) = build_choices(parsed)
        if isinstance(form, ResponsesFormat) and members.get("background"):
            return await self._begin(request, form, parsed, choice, members)
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

    async def _begin(
        self,
        request: web.Request,
        form: ResponsesFormat,
        parsed: ParsedRequest,
        choice: Choice,
        members: dict[str, Any],
    ) -> web.StreamResponse:
        # Begin a response in the background, and answer with its present state or its events.
        created = int(time.time())
        run = form.begin(parsed, created, members)
        chunks = form.chunks(parsed, choice, created, members)
        run.start(self._run(run, form, chunks, choice))
        if parsed.is_stream:
            return await send_events(request, run, 0)
        return json_answer(run.response)

    async def _run(
        self, run: BackgroundRun, form: ResponsesFormat, chunks: EventChunks, choice: Choice
    ) -> None:
        answer = PendingResponse(1, asyncio.get_running_loop())
        details = self.group.spec.cached_details
        run.update({"status": "in_progress"})
        run.add(chunks.begin())
        sink = RecordingSink(answer, chunks, choice.job, run, details)
        with self._submitted([choice], [sink], None):
            error = await answer.done
        if error is None:
            run.add(chunks.end(max(0, choice.job.cached) if details else None))
            run.update(form.stored(run.response["id"]))
        else:
            failure = {"code": "server_error", "message": error.message}
            run.add(form.failure(error))
            run.update({"status": "failed", "error": failure})

    async def listen(self, request: web.Request) -> web.StreamResponse:
        """Serve the audio APIs: POST /v1/audio/transcriptions and POST /v1/audio/translations."""
        fault = self._pick_fault(request)
        fields = await form_fields(request)
        name = client_request_id(request.headers) or uuid.uuid4().hex
        parsed = self._parse(b"{}", audio_format.read_audio(fields), request, f"trsc-{name}", True)
        raise_injected(fault)
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

    async def pool(self, request: web.Request) -> web.Response:
        """Serve a POST to an API that generates no text, such as embeddings.

        The response is delayed by the time that the engine needs to prefill the inputs.
        """
        fault = self._pick_fault(request)
        check_content_type(request)
        name = client_request_id(request.headers) or uuid.uuid4().hex
        read = pooling.READERS[request.path]
        job = read(await request.read(), request.headers, self.group.spec.served_name, name)
        raise_injected(fault)
        check_context(job.parsed.prompts, self.group.spec.context)
        choices = build_choices(job.parsed)
        answer = PendingResponse(len(choices), asyncio.get_running_loop())
        with self._submitted(choices, [WholeSink(answer) for _ in choices], fault):
            error = await answer.done
        if error is not None:
            raise error
        return json_answer(job.build(int(time.time())))

    def _pick_fault(self, request: web.Request) -> InjectedFault | None:
        # Return the fault of this request; apply it now if it precedes the response.
        fault = self.faults.pick_fault()
        if fault is not None and fault.kind is FaultKind.RESET_BEFORE_HEADERS:
            reset_now(request)
        return fault

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

    @contextmanager
    def _submitted(
        self, choices: Sequence[Choice], sinks: Sequence[TokenSink], fault: InjectedFault | None
    ) -> Iterator[None]:
        # Run the jobs of these choices during a `with` block, and abort them at its end.
        #
        # A KV fault hits the first choice.
        began_s = time.monotonic()
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
                if self._log is not None:
                    self._log.write(choice.prompt, choice.job.generated_count, began_s)

    def _extras(self, parsed: ParsedRequest, choice: Choice) -> openai_format.ResponseExtras:
        if self.pd_role is None or not isinstance(parsed.leg, PrefillLeg):
            return openai_format.NO_EXTRAS
        offered, speaks, here = choice.job.offered, self.pd_role.dialect, self.pd_role.identity
        inside = speaks.choice_members(parsed, offered, choice.tokens, here)
        return openai_format.ResponseExtras(
            speaks.response_members(parsed, parsed.leg, offered, here), inside
        )

    def _cached(self, parsed: ParsedRequest, choices: list[Choice]) -> int | None:
        # Return the cached prompt tokens for `usage`; None if the engine reports none.
        return (
            openai_format.cached_tokens(choices, parsed.n)
            if self.group.spec.cached_details
            else None
        )
