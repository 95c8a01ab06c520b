"""Sends the gateway's own requests to engines (probes): polls, and test requests for one token."""

from __future__ import annotations

import msgspec

from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.probe_errors import PROBE_ERRORS, NotSentError, clear_frames, is_not_sent
from gateway.http.engine_poll_client import PollClient
from gateway.protocol.response.usage_and_error_search import client_error_status, find_error_body
from kvtransfer.dialects import standalone_members
from policies.routing_types import Role

METRICS_LIMIT = 4 * 1024 * 1024
NO_PAGE = (404, 405, 501)  # statuses of an engine without the requested page
RATE_LIMITED = 429


class ProbeRequests:
    """Sends the gateway's own requests to engines; keeps one client for each endpoint."""

    def __init__(self) -> None:
        self._clients: dict[LiveEndpoint, PollClient] = {}

    def forget(self, live: LiveEndpoint) -> None:
        """Close the connection to an endpoint that leaves the configuration."""
        client = self._clients.pop(live, None)
        if client is not None:
            client.close()

    def close(self) -> None:
        """Close the connections to all engines, because the gateway stops."""
        for client in self._clients.values():
            client.close()

    async def get(
        self, live: LiveEndpoint, path: str, timeout_s: float
    ) -> tuple[int | None, bytes]:
        """Return status and body of a GET; the status is None without a response in time."""
        try:
            return await self.fetch(live, path, timeout_s, METRICS_LIMIT)
        except PROBE_ERRORS:
            return None, b""

    async def fetch(
        self,
        live: LiveEndpoint,
        path: str,
        timeout_s: float,
        limit: int,
        json_body: object = None,
    ) -> tuple[int, bytes]:
        """Return status and body of a POST with `json_body`, or of a GET without it.

        limit  maximum bytes of the body

        Raises one of PROBE_ERRORS when the engine cannot be reached or does not answer in time.
        """
        client = self._clients.get(live)
        if client is None:
            client = self._clients[live] = PollClient(live.endpoint.url, live.upstream.addresses)
        client.configure(live.key_header, live.encryption)
        try:
            if json_body is None:
                return await client.get(path, timeout_s, limit)
            body = msgspec.json.encode(json_body)
            return await client.post(path, body, timeout_s, limit)
        except PROBE_ERRORS as error:
            clear_frames(error)
            raise

    async def complete(
        self, live: LiveEndpoint, timeout_s: float, members: dict[str, object]
    ) -> int | None:
        """Request a completion with these members; return the answer's completion_status().

        Returns None without an answer, or, without sending anything, if no model of the engine is
        known. Raises NotSentError if this process could not send the request.
        """
        model = known_model(live)
        if model is None:
            return None
        body = {"model": model, **members}
        if live.endpoint.role is not Role.BOTH:
            body |= standalone_members(live.endpoint.engine)
        try:
            answer = await self.fetch(live, "/v1/completions", timeout_s, METRICS_LIMIT, body)
        except PROBE_ERRORS as error:
            if is_not_sent(error):
                raise NotSentError(str(error)) from None
            return None
        return completion_status(*answer)


def completion_status(status: int, body: bytes) -> int:
    """Return the status of an engine's answer; for an error with status 200, the error's code."""
    error = find_error_body(body) if status == 200 else None
    if error is None:
        return status
    return client_error_status(body, error) or 500


def known_model(live: LiveEndpoint) -> str | None:
    """Return a model name to use in the gateway's own requests, or None if none is known."""
    served = live.endpoint.served_model
    if served and (served in live.models or not live.models):
        return served
    return next(iter(live.models), None)
