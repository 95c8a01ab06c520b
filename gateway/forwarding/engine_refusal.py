"""Error responses of engines: which ones the request caused (4xx, 501), and sending them on.

All other error responses are failures of the engine: the request is retried elsewhere.
"""

from __future__ import annotations

import re

from gateway.fleet.reservation import Reservation
from gateway.http.client_interface import Client
from gateway.protocol.errors import response_not_found
from gateway.protocol.response.relay import Relay
from gateway.protocol.upstream_error import MODEL_GONE, UpstreamError
from gateway.request_record import Exchange

# 4xx statuses about the gateway's key for the engine or the engine's queue, which the client cannot
# fix.
ENDPOINT_FAULTS = frozenset({401, 403, 407, 408, 429})
# The error message of vLLM and SGLang for a model that they do not have.
_MODEL_GONE = re.compile(rb"[Mm]odel .{1,256} (does not exist|not found)")


def settle_failure(
    exchange: Exchange, client: Client, relay: Relay, reservation: Reservation
) -> None:
    """End a request whose answer is an error response, or a stream that ended with an error event.

    Raises UpstreamError if the engine itself failed before the client received anything.
    """
    if relay.is_refused:
        forward_refusal(exchange, client, relay, reservation.endpoint.name)
    else:
        exchange.set_interrupted("engine_error")
        reservation.on_failed(UpstreamError("engine_error", "the engine sent an error event"))


def forward_refusal(exchange: Exchange, client: Client, relay: Relay, endpoint: str) -> None:
    """Send an engine's error response to the client if the request caused the error (4xx or 501).

    Raises UpstreamError for other statuses, which are failures of the engine.
    """
    status, stored = refusal_status(relay), exchange.stored_at
    if status == 404 and stored is not None:
        raise response_not_found(stored.response_id)
    exchange.status, exchange.outcome, exchange.reason = status, "refused", "engine"
    headers = [
        *exchange.api.errors.id_headers(exchange.id),
        ("x-should-retry", "false"),
        ("x-penstock-endpoint", endpoint),
    ]
    body = exchange.api.errors.from_engine(status, relay.refusal_body)
    client.send_response(status, body, headers)


def refusal_status(relay: Relay) -> int:
    """Return the status of an engine's error response if the request caused the error.

    Raises UpstreamError if the engine itself failed. Status 501 counts as caused by the request:
    the API or feature that it needs is missing at the model's other engines too.
    """
    status = relay.status
    if status == 404 and _MODEL_GONE.search(relay.refusal_body):
        raise UpstreamError(MODEL_GONE, "the engine no longer serves the requested model")
    if (status != 501 and not 400 <= status < 500) or status in ENDPOINT_FAULTS:
        wait_s = None if relay.head is None else relay.head.wait_s
        raise UpstreamError(
            f"status_{status}",
            f"the engine answered the request with status {status}",
            wait_s=wait_s,
        )
    return status
