"""Stores responses in memory, so that later requests to the Responses API can continue them.

As in vLLM, storing is off by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mockgpu.http.background_responses import BackgroundRun
from mockgpu.request_parser import ApiError

MAX_RESPONSES = 4096
_NO_STORE = (
    "`store=True` (default) is not supported. Please set `store=False` in Responses API or set "
    "`VLLM_ENABLE_RESPONSES_API_STORE=1` in the env variable to start the vLLM server."
)


class StoredResponse(msgspec.Struct, frozen=True):
    """A response of the Responses API, and the conversation that a later request can continue.

    The conversation ends with the response. It leaves out the request's instructions.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]


class ResponsesStore:
    """The most recent responses by their id. Nothing is stored if `is_enabled` is false."""

    __slots__ = ("_responses", "_runs", "is_enabled")

    def __init__(self, is_enabled: bool = False) -> None:
        self.is_enabled = is_enabled
        self._responses: dict[str, StoredResponse] = {}
        self._runs: dict[str, BackgroundRun] = {}

    def check(self, members: Mapping[str, Any]) -> None:
        """Raise ApiError if a request in the background will not be stored.

        Clients fetch its result later, so storing must be on, and the request must not forbid it.
        """
        if members.get("background") and not members.get("store", True):
            text = "background can only be used when `store` is true"
            raise ApiError(400, f"1 validation error: {text}", "background")
        if members.get("background") and members.get("store", True) and not self.is_enabled:
            raise ApiError(400, _NO_STORE, "store")

    def messages_before(self, members: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
        """Return the messages of the earlier response that a request continues.

        Returns no messages if the request has no `previous_response_id`. Raises ApiError 404 if no
        response with that id is stored.
        """
        previous = members.get("previous_response_id")
        return () if previous is None else self.find(str(previous)).messages

    def keep(self, members: Mapping[str, Any], stored: StoredResponse) -> None:
        """Store a response, unless storing is off or the request has `store: false`."""
        if not self.is_enabled or members.get("store", True) is False:
            return
        while len(self._responses) >= MAX_RESPONSES:
            oldest = next(iter(self._responses))
            del self._responses[oldest]
            self._runs.pop(oldest, None)
        self._responses[stored.response["id"]] = stored

    def begin(self, members: Mapping[str, Any], stored: StoredResponse, run: BackgroundRun) -> None:
        """Store a response whose generation in the background has just begun."""
        self.keep(members, stored)
        self._runs[stored.response["id"]] = run

    def run_of(self, response_id: str) -> BackgroundRun | None:
        """Return the BackgroundRun that generated a response; None if it was not in the background.

        Raises ApiError 404 if no response with this id is stored.
        """
        self.find(response_id)
        return self._runs.get(response_id)

    def find(self, response_id: str) -> StoredResponse:
        """Return the stored response with this id. Raises ApiError 404 if it is unknown."""
        if response_id not in self._responses:
            raise ApiError(404, f"Response with id '{response_id}' not found.", "response_id")
        return self._responses[response_id]

    def delete(self, response_id: str) -> dict[str, Any]:
        """Delete a stored response, and return the confirmation to send to the client.

        Raises ApiError 404 if no response with this id is stored.
        """
        self.find(response_id)
        del self._responses[response_id]
        self._runs.pop(response_id, None)
        return {"id": response_id, "object": "response", "deleted": True}
