"""The HTTP handlers of Anthropic's `/v1/messages/batches`, beside those of files and batches."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from io import BufferedReader
from time import time

import msgspec
from aiohttp import web
from msgspec.structs import replace

from gateway.batch import message_batches
from gateway.batch.api_request_parser import BatchRequest
from gateway.batch.file_and_batch_objects import BatchRecord, FileRecord, RequestCounts
from gateway.batch.http_handlers import (
    PIECE_BYTES,
    BatchPages,
    batch_not_found,
    json_response,
    read_body,
    response_headers,
)
from gateway.batch.input_lines import BATCH_APIS
from gateway.batch.message_batch_input import MessageLines
from gateway.batch.storage_interface import StorageQuota
from gateway.protocol.api_table import MESSAGES
from gateway.protocol.error_formats import ANTHROPIC
from gateway.protocol.errors import Failure, GatewayError

log = logging.getLogger("penstock")

MAX_BATCH_BYTES = 32 * 1024 * 1024
"""Maximum size of a body that creates a batch, which is kept in memory as a whole."""
MAX_CREATED_AT_ONCE = 2
"""Maximum number of batches that are created at once; one of them per tenant, if there are any."""
assert MESSAGES.path in BATCH_APIS


class AllBatchPages(BatchPages):
    """The HTTP handlers for files, for OpenAI's batches and for Anthropic's message batches."""

    _creating: tuple[str, ...] = ()  # the tenants whose batches are being created

    def add_routes(self, server: web.Application) -> None:
        """Add the routes of files, batches and message batches to the API's aiohttp application."""
        super().add_routes(server)
        path, add = f"{MESSAGES.path}/batches", server.router
        add.add_post(path, self._create_messages)
        add.add_get(path, self._list_messages)
        add.add_get(f"{path}/{{id}}", self._show_messages)
        add.add_get(f"{path}/{{id}}/results", self._send_results)
        add.add_post(f"{path}/{{id}}/cancel", self._cancel_messages)

    async def _create_messages(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        if tenant and tenant in self._creating:  # so that others find a place
            message = "A batch of messages is being created with this key already."
            raise GatewayError(Failure.TENANT_CONCURRENCY_LIMITED, message, retry_after_s=1.0)
        if len(self._creating) >= MAX_CREATED_AT_ONCE:
            message = f"{MAX_CREATED_AT_ONCE} batches of messages are being created already."
            raise GatewayError(Failure.OVERLOADED, message, retry_after_s=1.0)
        self._creating += (tenant,)
        most_bytes = min(MAX_BATCH_BYTES, self._section.file_size)
        try:
            # The time is limited as a whole: other batches wait until this one is created.
            body = await read_body(request, most_bytes, self._snapshot().config.limits.body_timeout)
            record = await self._create_from(body, tenant, request)
        finally:
            place = self._creating.index(tenant)
            self._creating = self._creating[:place] + self._creating[place + 1 :]
        return json_response(message_batches.message_batch(record), ANTHROPIC)

    async def _create_from(self, raw: bytearray, tenant: str, request: web.Request) -> BatchRecord:
        # Store the input file and the batch that a body describes.
        section, limits = self._section, self._snapshot().config.limits
        await self._check_unfinished(tenant, section)
        lines = MessageLines(raw, section.lines, limits.body)
        quota = StorageQuota(section.files, section.storage, section.file_size)
        upload = await self._run(self._store.start_upload, tenant, quota)
        try:
            while text := await self._threads.run(lines.next):
                await self._run(upload.write, text)
            now = int(time())
            expires_at = int(now + section.expiry)
            file = FileRecord(upload.id, "messages.jsonl", "batch", upload.size, now, expires_at)
            await self._run(self._store.commit_upload, tenant, upload, file)
        finally:
            self._close_later(upload)
        window_s = min(message_batches.WINDOW_S, section.window)
        asked = BatchRequest(file.id, MESSAGES.path, message_batches.WINDOW, None, window_s)
        record = self._new_record(asked, tenant, self._scope(request))
        record = replace(record, counts=RequestCounts(lines.count))
        await self._run(self._store.create_batch, record)
        self._runner.wake()
        return record

    async def _list_messages(self, request: web.Request) -> web.StreamResponse:
        batches = await self._run(self._store.batches, self._tenant(request))
        return json_response(message_batches.page(batches, request.query), ANTHROPIC)

    async def _show_messages(self, request: web.Request) -> web.StreamResponse:
        batch = await self._messages(request)
        return json_response(message_batches.message_batch(batch), ANTHROPIC)

    async def _cancel_messages(self, request: web.Request) -> web.StreamResponse:
        await self._cancel(await self._messages(request))
        batch = await self._messages(request)
        return json_response(message_batches.message_batch(batch), ANTHROPIC)

    async def _send_results(self, request: web.Request) -> web.StreamResponse:
        batch = await self._messages(request)
        if not batch.is_final:
            raise batch_not_found(
                "The batch has not ended yet; its results are available afterwards."
            )
        with ExitStack() as files:
            # Both are opened before the response begins: no error can be sent after that.
            contents = [
                files.enter_context(await self._opened(batch, name))
                for name in (batch.output_file_id, batch.error_file_id)
                if name
            ]
            response = web.StreamResponse(headers=response_headers(ANTHROPIC))
            response.content_type = "application/x-jsonl"
            await response.prepare(request)
            try:
                for content in contents:
                    while text := await self._threads.run(_results, content):
                        await response.write(text)
                await response.write_eof()
            except (OSError, msgspec.DecodeError) as error:
                _break_off(request, batch.id, error)
        return response

    async def _opened(self, batch: BatchRecord, name: str) -> BufferedReader:
        try:
            content: BufferedReader = await self._run(self._store.open_content, batch.tenant, name)
        except GatewayError as error:
            if error.failure is not Failure.FILE_NOT_FOUND:
                raise
            raise batch_not_found("The results of the batch have been deleted.") from None
        return content

    async def _messages(self, request: web.Request) -> BatchRecord:
        tenant, name = self._tenant(request), request.match_info["id"]
        own = message_batches.own_id(name)
        batch: BatchRecord | None = await self._run(self._store.batch, tenant, own) if own else None
        if batch is None or batch.endpoint != MESSAGES.path:
            raise batch_not_found(f"No batch found with id '{name[:64]}'.")
        return batch


def _break_off(request: web.Request, batch_id: str, error: Exception) -> None:
    # Close the connection without a last chunk, so that the client sees that results are missing.
    if not isinstance(error, ConnectionError):  # which is the client's
        log.error("the results of %s broke off: %s", batch_id, error)
    if request.transport is not None:
        request.transport.close()


def _results(content: BufferedReader) -> bytes:
    # Return the results in the next lines of an output or error file; b"" at its end.
    return b"".join(map(message_batches.result, content.readlines(PIECE_BYTES)))
