"""The records of files and batches, their states, and their JSON form for clients. No I/O.

Times are Unix seconds.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from gateway.batch.token_usage import TokenUsage

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


def new_id(prefix: str) -> str:
    """Return a new random id with the given prefix. It cannot be guessed."""
    return prefix + secrets.token_hex(16)


class BatchState(StrEnum):
    """The states of a batch of requests, named as in OpenAI's Batch API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


FINAL_STATES = frozenset(
    (BatchState.FAILED, BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED)
)


class FileRecord(msgspec.Struct, frozen=True):
    """The stored description of one file, without its content.

    size        number of bytes of the content
    expires_at  when the file will be deleted
    """

    id: str
    filename: str
    purpose: str
    size: int
    created_at: int
    expires_at: int

    def as_object(self) -> dict[str, Any]:
        """Return the description of the file as OpenAI's API presents it to clients."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class LineProblem(msgspec.Struct, frozen=True):
    """One reason why the input file of a batch is refused.

    `line` counts from 1. None means that the problem concerns the whole file.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class RequestCounts(msgspec.Struct, frozen=True):
    """How many requests a batch has, and how many of them are completed and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, frozen=True):
    """The stored description of one batch.

    tenant           the tenant that owns the batch; "" if the API needs no key
    scope            digest of the API key that created the batch, if the key is limited to some
                     models; else "". The key itself is never stored
    window           the completion window as the client wrote it
    expires_at       the end of the completion window
    model            the model of all requests; "" until the input file has been validated
    state_times      when the batch entered each state, by the state's name
    result_file_ids  ids for the output file and the errors file, stored before these are written
    schedule         whether the batch is expected to end within its completion window
                     (gateway/batch/completion_window.py); valid only in the state IN_PROGRESS
    output_expiry_s  seconds after which the files of results expire, if the client set a time
    usage            tokens of all answers, once the batch has ended
    request_times_s  mean and longest time of its requests in seconds; None: unknown
    unanswered       number of requests without a result when the batch ended; they count as failed
    """

    id: str
    tenant: str
    scope: str
    endpoint: str
    input_file_id: str
    window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    state: BatchState = BatchState.VALIDATING
    state_times: Mapping[str, int] = {}
    counts: RequestCounts = RequestCounts()
    problems: tuple[LineProblem, ...] = ()
    model: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None
    result_file_ids: tuple[str, ...] = ()
    schedule: str = ""
    output_expiry_s: int | None = None
    usage: TokenUsage | None = None
    request_times_s: tuple[float, float] | None = None
    unanswered: int = 0

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    def enter(self, state: BatchState, now: float, **changes: Any) -> BatchRecord:
        """Return a copy of the record in the state `state`, with the other `changes` too.

        `now` is the Unix time at which the batch enters the state. If the batch was in this state
        before, the recorded time stays.
        """
        times = {**self.state_times}
        times.setdefault(state.value, int(now))
        return msgspec.structs.replace(self, state=state, state_times=times, **changes)

    def as_object(self) -> dict[str, Any]:
        """Return the batch as OpenAI's API presents it, with the additional member `schedule`."""
        times = self.state_times
        names = ("in_progress", "finalizing", "completed", "failed", "expired")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": list_of_problems(self.problems),
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.state.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": times.get(name) for name in names},
            "cancelling_at": times.get("cancelling"),
            "cancelled_at": times.get("cancelled"),
            "request_counts": msgspec.to_builtins(self.counts),
            "metadata": self.metadata,
            "model": self.model or None,
            "usage": None if self.usage is None else self.usage.as_object(),
            "schedule": self.schedule if self.state is BatchState.IN_PROGRESS else None,
        }


def list_of_problems(problems: Sequence[LineProblem]) -> dict[str, Any] | None:
    """Return the value of a batch object's member `errors`; None if there are no problems."""
    data = [msgspec.to_builtins(problem) for problem in problems]
    return {"object": "list", "data": data} if data else None


def list_object(items: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return one page of files or batches as a `list` object, as in OpenAI's API."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
