"""Writes the lines of a batch's output and error files, in OpenAI's format. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec


def result_line(
    number: int,
    batch_id: str,
    custom_id: str,
    response: tuple[int, str, bytes] | None,
    error: tuple[str, str] | None = None,
) -> bytes:
    """Return one line of a batch's output or error file, in OpenAI's format, with its line feed.

    response  (status, request id, JSON body) of the answer; None without an answer
    error     (code, message) of a request that was not answered
    """
    shown: dict[str, Any] | None = None
    if response is not None:
        status, request_id, body = response
        shown = {"status_code": status, "request_id": request_id, "body": _json(body)}
    return (
        msgspec.json.encode(
            {
                "id": f"batch_req_{batch_id.removeprefix('batch_')}{number:08x}",
                "custom_id": custom_id,
                "response": shown,
                "error": None if error is None else {"code": error[0], "message": error[1]},
            }
        )
        + b"\n"
    )


def _json(body: bytes) -> msgspec.Raw | None:
    # Return a body as raw JSON on one line; text that is not JSON becomes a JSON string.
    try:
        return msgspec.Raw(msgspec.json.format(msgspec.Raw(body), indent=-1)) if body else None
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(body.decode("utf-8", "replace")))
