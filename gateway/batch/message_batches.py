"""Converts stored batches and their results to the objects of Anthropic's Message Batches. No I/O.

A message batch is a batch whose requests use the Messages API. message_batch_input.py writes its
input file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.batch.file_and_batch_objects import BATCH_ID, BatchRecord, BatchState
from gateway.protocol.api_table import MESSAGES
from gateway.protocol.error_formats import ANTHROPIC
from gateway.protocol.errors import Failure, GatewayError

WINDOW, WINDOW_S = "24h", 86_400.0  # as in Anthropic's API
MAX_PAGE, PAGE = 1000, 20
_ID, _OWN_ID = "msgbatch_", "batch_"


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    type: str


class _Reason(msgspec.Struct):
    code: str
    message: str


class _ResultLine(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Reason | None = None


_decode_result = msgspec.json.Decoder(_ResultLine).decode
_decode_error = msgspec.json.Decoder(_Error).decode
_encode = msgspec.json.Encoder().encode


def own_id(batch_id: str) -> str:
    """Convert the id of a message batch, as clients see it, to the id of the stored batch."""
    name = _OWN_ID + batch_id.removeprefix(_ID)
    return name if batch_id.startswith(_ID) and BATCH_ID.fullmatch(name) else ""


def message_batch(record: BatchRecord) -> dict[str, Any]:
    """Convert the stored record of a batch to a message batch object of Anthropic's API."""
    times, name = record.state_times, _ID + record.id.removeprefix(_OWN_ID)
    state = "ended" if record.is_final else "in_progress"
    if record.state is BatchState.CANCELLING:
        state = "canceling"
    ended = times.get(record.state.value) if record.is_final else None
    return {
        "id": name,
        "type": "message_batch",
        "processing_status": state,
        "request_counts": _counts(record),
        "created_at": _time(record.created_at),
        "expires_at": _time(record.expires_at),
        "ended_at": _time(ended),
        "cancel_initiated_at": _time(times.get(BatchState.CANCELLING.value)),
        "archived_at": None,
        "results_url": f"{MESSAGES.path}/batches/{name}/results" if record.is_final else None,
    }


def page(records: Sequence[BatchRecord], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the requested page of a tenant's message batches, newest first.

    Raises GatewayError for an invalid query, or one that names an unknown batch.
    """
    batches = [record for record in records if record.endpoint == MESSAGES.path]
    limit = query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 0 < int(limit) <= MAX_PAGE):
        raise _bad(f"The query parameter limit must be from 1 to {MAX_PAGE}.", "limit")
    ids, start, end = [record.id for record in batches], 0, len(batches)
    for name in ("after_id", "before_id"):
        if name in query:
            if (wanted := own_id(query[name])) not in ids:
                raise _bad(
                    f"The query parameter {name} must be the id of a batch; no batch has the id "
                    f"'{query[name][:64]}'.",
                    name,
                )
            if name == "after_id":
                start = ids.index(wanted) + 1
            else:
                end = ids.index(wanted)
    if "before_id" in query:
        start = max(start, end - int(limit))
    shown = [message_batch(record) for record in batches[start : min(end, start + int(limit))]]
    return {
        "data": shown,
        "has_more": start > 0 if "before_id" in query else start + int(limit) < end,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def result(line: bytes) -> bytes:
    """Convert a line of a batch's output or error file to a result line of Anthropic's API."""
    read = _decode_result(line)
    if read.response is not None:
        answer = read.response
        if answer.status_code == 200:
            return _line(read.custom_id, {"type": "succeeded", "message": answer.body})
        return _line(read.custom_id, {"type": "errored", "error": _error(answer)})
    code = "" if read.error is None else read.error.code
    if code in ("batch_expired", "batch_cancelled"):
        return _line(read.custom_id, {"type": "expired" if code == "batch_expired" else "canceled"})
    message = "The request was not answered." if read.error is None else read.error.message
    error = {"type": "error", "error": {"type": "api_error", "message": message}}
    return _line(read.custom_id, {"type": "errored", "error": error})


def _error(answer: _Response) -> msgspec.Raw:
    # Return an error in Anthropic's form. Errors of the runner of batches have OpenAI's form.
    body = bytes(answer.body)
    try:
        if _decode_error(body).type == "error":
            return answer.body
    except (msgspec.DecodeError, RecursionError):
        pass
    return msgspec.Raw(ANTHROPIC.from_engine(answer.status_code, body))


def _line(custom_id: str, shown: Mapping[str, Any]) -> bytes:
    return _encode({"custom_id": custom_id, "result": shown}) + b"\n"


def _counts(record: BatchRecord) -> dict[str, int]:
    # Return the number of requests by outcome. All are being processed until the batch has ended.
    counts, missing = record.counts, record.unanswered
    if not record.is_final:
        return _tally(processing=counts.total)
    tally = _tally(succeeded=counts.completed, errored=counts.total - counts.completed - missing)
    tally["canceled" if record.state is BatchState.CANCELLED else "expired"] = missing
    return tally


def _tally(processing: int = 0, succeeded: int = 0, errored: int = 0) -> dict[str, int]:
    ended = {"succeeded": succeeded, "errored": errored, "canceled": 0, "expired": 0}
    return {"processing": processing, **ended}


def _time(seconds: int | None) -> str | None:
    # Return a time as in RFC 3339.
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _bad(message: str, param: str | None) -> GatewayError:
    return GatewayError(Failure.BAD_REQUEST, message, param=param)
