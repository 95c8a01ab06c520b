"""The HTTP handlers of `/v1/files` and `/v1/batches`, for the aiohttp application of the API.

For a file or batch of another tenant, the response is the same 404 as for one that does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from time import time
from typing import Any, TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.batch.api_request_parser import (
    BatchRequest,
    FileForm,
    check_purpose,
    page_of,
    read_batch_request,
    read_page_query,
)
from gateway.batch.batch_runner import REOPEN_S, BatchRunner
from gateway.batch.file_and_batch_objects import BatchRecord, BatchState, FileRecord, new_id
from gateway.batch.input_lines import BATCH_APIS
from gateway.batch.pool_access import scope_digest
from gateway.batch.storage_interface import (
    StorageFullError,
    StorageQuota,
    StorageUnreachableError,
    Upload,
)
from gateway.batch.storage_threads import StorageThreads
from gateway.config import BatchApi
from gateway.protocol.error_formats import OPENAI, ErrorFormat
from gateway.protocol.errors import Failure, GatewayError, new_request_id
from gateway.protocol.request.api_keys import digest_of_headers
from gateway.routes_and_snapshot import Snapshot

T = TypeVar("T")

PIECE_BYTES = 256 * 1024
PIECE_TIMEOUT_S = 30.0  # time for a client to send one piece of an upload
MAX_UPLOADS = 16  # maximum number of concurrent uploads in one process
READ_THREADS = 8  # number of threads for calls of the storage other than uploads
MAX_FIELD_BYTES = 4096
MAX_BODY_BYTES = 64 * 1024


class BatchPages:
    """The HTTP handlers for files and batches, which use the storage of one BatchRunner."""

    def __init__(
        self, runner: BatchRunner, snapshot: Callable[[], Snapshot], section: BatchApi
    ) -> None:
        """Create the handlers for files and batches.

        runner    runs the batches
        snapshot  function that returns the current configuration
        section   section `batch` of the configuration at the start, which is used after a reload
                  that has removed the section
        """
        self._runner, self._store = runner, runner.storage
        self._threads = StorageThreads(MAX_UPLOADS + READ_THREADS)
        self._snapshot, self._first_section = snapshot, section
        self._uploads = 0
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def _section(self) -> BatchApi:
        return self._snapshot().config.batch or self._first_section

    def add_routes(self, server: web.Application) -> None:
        add = server.router
        add.add_post("/v1/files", self._upload)
        add.add_get("/v1/files", self._list_files)
        add.add_get("/v1/files/{id}", self._show_file)
        add.add_delete("/v1/files/{id}", self._delete_file)
        add.add_get("/v1/files/{id}/content", self._send_content)
        add.add_post("/v1/batches", self._create_batch)
        add.add_get("/v1/batches", self._list_batches)
        add.add_get("/v1/batches/{id}", self._show_batch)
        add.add_post("/v1/batches/{id}/cancel", self._cancel_batch)

    # Files

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        tenant, section = self._tenant(request), self._section
        if not request.content_type.startswith("multipart/"):
            raise _bad("The body must be a form (multipart/form-data).", None)
        if self._uploads >= MAX_UPLOADS:
            message = f"{MAX_UPLOADS} files are being uploaded already."
            raise GatewayError(Failure.OVERLOADED, message, retry_after_s=1.0)
        self._uploads += 1
        upload: Upload | None = None
        try:
            quota = StorageQuota(section.files, section.storage, section.file_size)
            upload = await self._run(self._store.start_upload, tenant, quota)
            form = await self._read_form(request, upload, section.file_size)
            record = form.record(upload.id, time(), section.expiry, upload.size)
            await self._run(self._store.commit_upload, tenant, upload, record)
        finally:
            self._uploads -= 1
            if upload is not None:
                self._close_later(upload)
        return json_response(record.as_object())

    def _close_later(self, upload: Upload) -> None:
        # Close the upload in a separate task: this task is cancelled, perhaps twice, if the client
        # disconnects.
        task = asyncio.create_task(self._close(upload))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, upload: Upload) -> None:
        with suppress(OSError):  # the janitor deletes remaining parts of the upload later
            await self._threads.run(upload.close)

    async def _read_form(self, request: web.Request, upload: Upload, max_bytes: int) -> FileForm:
        # Receive an upload form; write the file's bytes to `upload` and return the other fields.
        fields: dict[str, str] = {}
        filename = None
        reader = await _received(request.multipart())
        while (part := await _received(reader.next())) is not None:
            if not isinstance(part, BodyPartReader):
                raise _bad(
                    "The form is invalid: one of its parts is a form itself; send one form.",
                    None,
                )
            if part.name == "file" and filename is None:
                filename = part.filename or "file"
                async for piece in _pieces(part):
                    if upload.size + len(piece) > max_bytes:
                        message = f"The file is larger than {max_bytes} bytes."
                        raise GatewayError(Failure.TOO_LARGE, message, param="file")
                    await self._run(upload.write, piece)
            elif part.name is not None and len(fields) < 8:
                value = b""
                async for piece in _pieces(part):
                    value += piece
                    if len(value) > MAX_FIELD_BYTES:
                        raise _bad(
                            f"The form field '{part.name[:64]}' exceeds {MAX_FIELD_BYTES} bytes.",
                            part.name[:64],
                        )
                fields[part.name] = value.decode("utf-8", "replace")
            else:
                raise _bad("The form may have one file and 8 other fields, all with names.", "file")
        return FileForm(filename, fields)

    async def _list_files(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        page = read_page_query(request.query, 10_000)
        purpose = request.query.get("purpose")
        files = await self._run(self._store.files, tenant)
        now = time()
        shown = [f for f in files if purpose in (None, f.purpose) and f.expires_at > now]
        return json_response(page_of(shown, page))

    async def _show_file(self, request: web.Request) -> web.StreamResponse:
        return json_response((await self._file(request)).as_object())

    async def _delete_file(self, request: web.Request) -> web.StreamResponse:
        file = await self._file(request)
        await self._run(self._store.delete_file, self._tenant(request), file.id)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def _send_content(self, request: web.Request) -> web.StreamResponse:
        file, tenant = await self._file(request), self._tenant(request)
        content = await self._run(self._store.open_content, tenant, file.id)
        with content:
            response = web.StreamResponse(headers=response_headers())
            response.content_type = "application/octet-stream"
            response.content_length = file.size
            await response.prepare(request)
            while piece := await self._threads.run(content.read, PIECE_BYTES):
                await response.write(piece)
            await response.write_eof()
        return response

    async def _file(self, request: web.Request) -> FileRecord:
        tenant, file_id = self._tenant(request), request.match_info["id"]
        file: FileRecord | None = await self._run(self._store.file, tenant, file_id)
        if file is None or file.expires_at <= time():
            raise file_not_found(file_id)
        return file

    # Batches

    async def _create_batch(self, request: web.Request) -> web.StreamResponse:
        tenant, section = self._tenant(request), self._section
        batch_request = read_batch_request(
            bytes(await read_body(request)), section.window, BATCH_APIS
        )
        file = await self._run(self._store.file, tenant, batch_request.input_file_id)
        if file is None:
            raise file_not_found(batch_request.input_file_id)
        check_purpose(file)
        await self._check_unfinished(tenant, section)
        record = self._new_record(batch_request, tenant, self._scope(request))
        await self._run(self._store.create_batch, record)
        self._runner.wake()
        return json_response(record.as_object())

    async def _check_unfinished(self, tenant: str, section: BatchApi) -> None:
        # Raise GatewayError if the tenant has as many unfinished batches as it may have.
        batches = await self._run(self._store.batches, tenant)
        if sum(not batch.is_final for batch in batches) >= section.batches:
            message = f"The tenant has {section.batches} unfinished batches, the most it may have."
            raise GatewayError(Failure.TENANT_RATE_LIMITED, message)

    def _new_record(self, batch_request: BatchRequest, tenant: str, scope: str) -> BatchRecord:
        now = int(time())
        return BatchRecord(
            new_id("batch_"),
            tenant,
            scope,
            batch_request.endpoint,
            batch_request.input_file_id,
            batch_request.completion_window,
            now,
            now + int(batch_request.window_s),
            batch_request.metadata,
            output_expiry_s=batch_request.output_expiry_s,
        )

    async def _list_batches(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        page = read_page_query(request.query, 100, default=20)
        batches = await self._run(self._store.batches, tenant)
        return json_response(page_of(batches, page))

    async def _show_batch(self, request: web.Request) -> web.StreamResponse:
        return json_response((await self._batch(request)).as_object())

    async def _cancel_batch(self, request: web.Request) -> web.StreamResponse:
        await self._cancel(await self._batch(request))
        return json_response((await self._batch(request)).as_object())

    async def _cancel(self, batch: BatchRecord) -> None:
        # Request the cancellation of a batch. Raises GatewayError if that is too late.
        if batch.is_final or batch.state is BatchState.FINALIZING:
            message = f"Cannot cancel a batch with status '{batch.state.value}'."
            raise GatewayError(Failure.BATCH_CONFLICT, message)
        await self._run(self._store.request_cancel, batch)
        self._runner.wake()

    async def _batch(self, request: web.Request) -> BatchRecord:
        tenant, batch_id = self._tenant(request), request.match_info["id"]
        batch: BatchRecord | None = await self._run(self._store.batch, tenant, batch_id)
        if batch is None:
            raise batch_not_found(f"No batch found with id '{batch_id[:64]}'.")
        return batch

    # Common

    def _tenant(self, request: web.Request) -> str:
        return self._snapshot().authenticate(request.headers)

    def _scope(self, request: web.Request) -> str:
        # Return the digest of the request's API key if it is limited to some models, else "".
        scopes = self._snapshot().scopes
        if not scopes:
            return ""
        digest = digest_of_headers(request.headers)
        return scope_digest(digest) if digest in scopes else ""

    async def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        # Run a blocking call of the storage in a thread. Raises GatewayError if that fails.
        if not self._runner.is_open:
            raise _unreachable()
        try:
            return await self._threads.run(call, *args)
        except StorageFullError as error:
            raise GatewayError(Failure.STORAGE_FULL, str(error)) from None
        except FileNotFoundError:
            raise file_not_found("") from None
        except StorageUnreachableError:
            raise _unreachable() from None
        except OSError as error:
            message = f"The gateway cannot use its storage of files ({error.strerror})."
            raise GatewayError(Failure.INTERNAL, message) from None


def _unreachable() -> GatewayError:
    message = "The gateway cannot reach its storage of files and batches. Try again."
    return GatewayError(Failure.STORAGE_UNREACHABLE, message, retry_after_s=REOPEN_S)


def batch_not_found(message: str) -> GatewayError:
    """Return the error (404) for a batch that is unknown, deleted, or another tenant's."""
    return GatewayError(Failure.BATCH_NOT_FOUND, message, param="batch_id")


def file_not_found(file_id: str) -> GatewayError:
    """Return the error for a file that is unknown, deleted, expired, or of another tenant."""
    message = f"No such File object: {file_id[:64]}"
    return GatewayError(Failure.FILE_NOT_FOUND, message, param="id")


async def _pieces(part: BodyPartReader) -> AsyncIterator[bytes]:
    while not part.at_eof():
        piece = await _received(part.read_chunk(PIECE_BYTES))
        if piece:
            yield piece


async def _received(reading: Awaitable[T]) -> T:
    # Return what is read of a form. Raises GatewayError if it is malformed or comes too slowly.
    try:
        async with asyncio.timeout(PIECE_TIMEOUT_S):
            return await reading
    except TimeoutError:
        raise _too_slow() from None
    except (ValueError, AssertionError, HttpProcessingError) as error:
        raise _bad(f"The body is not a valid form (multipart/form-data): {error}.", None) from None


def _too_slow() -> GatewayError:
    message = "The request's body did not arrive in time."
    return GatewayError(Failure.REQUEST_TIMEOUT, message)


async def read_body(
    request: web.Request, max_bytes: int = MAX_BODY_BYTES, within_s: float = PIECE_TIMEOUT_S
) -> bytearray:
    """Read a request's body. Raises GatewayError if it is too large or arrives too slowly."""
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > max_bytes:
                    message = f"The request body is larger than {max_bytes} bytes."
                    raise GatewayError(Failure.TOO_LARGE, message)
    except TimeoutError:
        raise _too_slow() from None
    return body


def _bad(message: str, param: str | None) -> GatewayError:
    return GatewayError(Failure.BAD_REQUEST, message, param=param)


def response_headers(shape: ErrorFormat = OPENAI) -> dict[str, str]:
    """Return the headers that every response of the Batch API has, with a new request id."""
    return {"server": "penstock", **dict(shape.id_headers(new_request_id()))}


def json_response(body: dict[str, Any], shape: ErrorFormat = OPENAI) -> web.Response:
    """Return a JSON response with status 200; `shape` selects the headers of its API."""
    headers = response_headers(shape)
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", headers=headers
    )
