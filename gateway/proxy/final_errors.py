"""The errors that clients get after the last attempt: as a response, or at the end of a stream."""

from __future__ import annotations

from gateway.http.client_interface import Client
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.upstream_error import MODEL_GONE, SHUTDOWN, UpstreamError
from gateway.proxy.context_length import is_too_long, too_long_error
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Route
from policies.filters import serves_tenant
from policies.routing_types import RoutingQuery


def no_endpoint_error(
    exchange: Exchange, route: Route, query: RoutingQuery, problem: UpstreamError | None
) -> GatewayError:
    """Return the client's error when no endpoint can be picked for a request.

    `problem` is the error of the last attempt; None if there was none. If the request was sent to
    no endpoint, the error says why none could be picked.
    """
    if problem is not None and exchange.failed_attempts:
        return last_attempt_error(exchange, problem)
    serving = serves_tenant(query, route.candidates)
    if route.candidates and not serving:
        message = f"No endpoint of model '{route.name}' serves this tenant."
        return GatewayError(Failure.NO_CAPACITY, message, retry_after_s=1.0)
    if serving and exchange.call is not None and is_too_long(exchange.call, serving):
        return too_long_error(query.request)
    message = f"No endpoint of model '{route.name}' is available."
    return GatewayError(Failure.NO_CAPACITY, message, retry_after_s=1.0)


def last_attempt_error(exchange: Exchange, problem: UpstreamError) -> GatewayError:
    """Return the client's error for a request whose last attempt failed with `problem`."""
    if problem.kind == MODEL_GONE:
        message = (
            f"No engine serves the model '{exchange.model}' any more: "
            f"{exchange.failed_attempts} answered that it does not exist."
        )
        return GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")
    failure = Failure.UPSTREAM_TIMEOUT if problem.kind == "timeout" else Failure.UPSTREAM_FAILED
    message = f"No engine could respond ({problem.kind}); attempts: {exchange.failed_attempts}."
    return GatewayError(failure, message, retry_after_s=problem.wait_s)


def end_stream_with_error(exchange: Exchange, client: Client, problem: UpstreamError) -> None:
    """End an answer that broke after its first byte.

    The client receives an error event if the response's framing permits one. Otherwise its
    connection is closed.
    """
    assert exchange.relay is not None
    if problem.kind == SHUTDOWN:
        failure, message = Failure.SHUTTING_DOWN, "The gateway stopped during the response. Retry."
    else:
        failure = Failure.UPSTREAM_FAILED
        message = f"The engine failed while answering ({problem.kind})."
    ending = exchange.relay.end_with_error(failure, message)
    # With `ending`, the answer is framed completely: the connection can carry further requests.
    if ending:
        client.write(ending)
    else:
        client.close_after_write()
    exchange.set_interrupted(problem.kind)
