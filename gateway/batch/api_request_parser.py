"""Parses requests about files and batches: upload forms, bodies and list queries. No I/O."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

import msgspec

from gateway.batch.file_and_batch_objects import BatchRecord, FileRecord, list_object
from gateway.protocol.errors import Failure, GatewayError
from gateway.util.durations_and_sizes import UnitError, parse_duration

PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000  # the limits of OpenAI's API
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
MIN_WINDOW_S = 1.0
MAX_FILENAME_CHARS = 255


class FileForm(msgspec.Struct, frozen=True):
    """The form of a file upload: the file's name and the other fields.

    The name is None if the form has no file.
    """

    filename: str | None
    fields: Mapping[str, str]

    def record(self, file_id: str, now: float, expiry_s: float, size: int) -> FileRecord:
        """Return the record to store for an uploaded file.

        Raises GatewayError if the upload form is invalid.
        """
        if self.filename is None:
            raise _bad('The form must contain a file (field "file").', "file")
        purpose = self.fields.get("purpose", "")
        if purpose not in PURPOSES:
            raise _bad(f"The field purpose must be one of {', '.join(PURPOSES)}.", "purpose")
        name = self.filename.replace("\x00", "")[-MAX_FILENAME_CHARS:]
        expires_at = int(now + min(self._expiry_s() or expiry_s, expiry_s))
        return FileRecord(file_id, name, purpose, size, int(now), expires_at)

    def _expiry_s(self) -> int | None:
        # Return after how many seconds the client wants the file deleted; None for the default.
        anchor = self.fields.get("expires_after[anchor]", "created_at")
        seconds = self.fields.get("expires_after[seconds]")
        if seconds is None:
            return None
        if anchor != "created_at":
            raise _bad(
                "The field expires_after[anchor] must be created_at.", "expires_after[anchor]"
            )
        is_number = seconds.isascii() and seconds.isdigit() and len(seconds) < 9
        _check_expiry(int(seconds) if is_number else 0, "expires_after[seconds]")
        return int(seconds)


class BatchRequest(msgspec.Struct, frozen=True):
    """The body of a request to create a batch.

    window_s         the batch's completion window in seconds
    output_expiry_s  seconds after which the batch's result files expire; None: the default
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    window_s: float = 0.0
    output_expiry_s: int | None = None


class _Expiry(msgspec.Struct):
    seconds: int
    anchor: Literal["created_at"]


class _Body(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _Expiry | None = None


_decode = msgspec.json.Decoder(_Body).decode


def read_batch_request(raw: bytes, max_window_s: float, endpoints: Container[str]) -> BatchRequest:
    """Parse and check the body of a request to create a batch.

    max_window_s  longest completion window in seconds
    endpoints     API paths that the requests of a batch may use

    Raises GatewayError with a message that names what is invalid.
    """
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(f"The body is not a valid request to create a batch: {error}.", None) from None
    if body.endpoint not in endpoints:
        raise _bad(
            f"The requests of a batch cannot use the endpoint '{body.endpoint[:64]}'.",
            "endpoint",
        )
    try:
        window_s = parse_duration(body.completion_window)
    except UnitError as error:
        raise _bad(
            f"The completion window (completion_window) {error}.", "completion_window"
        ) from None
    if not MIN_WINDOW_S <= window_s <= max_window_s:
        message = f"The completion window must be from 1s to {max_window_s:g}s."
        raise _bad(message, "completion_window")
    _check_metadata(body.metadata)
    expiry, expiry_s = body.output_expires_after, None
    if expiry is not None:
        expiry_s = expiry.seconds
        _check_expiry(expiry_s, "output_expires_after")
    window, metadata = body.completion_window, body.metadata
    return BatchRequest(body.input_file_id, body.endpoint, window, metadata, window_s, expiry_s)


def _check_expiry(seconds: int, param: str) -> None:
    if not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise _bad(f"'{param}' must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S} seconds.", param)


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is None:
        return
    is_long = any(len(key) > 64 or len(v) > MAX_METADATA_CHARS for key, v in metadata.items())
    if len(metadata) > MAX_METADATA or is_long:
        message = (
            f"Metadata has at most {MAX_METADATA} pairs, with keys of 64 and values of "
            f"{MAX_METADATA_CHARS} characters."
        )
        raise _bad(message, "metadata")


def check_purpose(file: FileRecord) -> None:
    """Raise GatewayError if the file was not uploaded with the purpose `batch`."""
    if file.purpose != "batch":
        message = f"The file's purpose must be 'batch', not '{file.purpose}'."
        raise _bad(message, "input_file_id")


class PageQuery(msgspec.Struct, frozen=True):
    """The requested page of a list of files or batches.

    It has at most `limit` items, which come after the item with the id `after`.
    """

    limit: int
    after: str = ""
    is_oldest_first: bool = False


def read_page_query(
    query: Mapping[str, str], max_limit: int, default: int | None = None
) -> PageQuery:
    """Parse the query string of a request for a list of files or batches.

    query      the decoded query string
    max_limit  largest permitted page size
    default    page size if the query has no `limit`

    Raises GatewayError for an invalid value.
    """
    text = query.get("limit", str(default or max_limit))
    if not (text.isascii() and text.isdigit() and len(text) < 7 and 0 < int(text) <= max_limit):
        raise _bad(f"The query parameter limit must be from 1 to {max_limit}.", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _bad("The query parameter order must be asc or desc.", "order")
    return PageQuery(int(text), query.get("after", ""), order == "asc")


def page_of(items: Sequence[FileRecord | BatchRecord], query: PageQuery) -> dict[str, Any]:
    """Return the requested page of `items`, newest first, as a list object of OpenAI's API.

    Raises GatewayError if no item has the id `after`.
    """
    ordered = items[::-1] if query.is_oldest_first else items
    start = 0
    if query.after:
        ids = [item.id for item in ordered]
        if query.after not in ids:
            raise _bad(
                f"The list has no item with the id '{query.after[:64]}' (query parameter after).",
                "after",
            )
        start = ids.index(query.after) + 1
    page = ordered[start : start + query.limit]
    has_more = start + query.limit < len(ordered)
    return list_object([item.as_object() for item in page], has_more=has_more)


def _bad(message: str, param: str | None) -> GatewayError:
    return GatewayError(Failure.BAD_REQUEST, message, param=param)
