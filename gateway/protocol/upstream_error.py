"""The exception for a failed engine response, and what it shows about the endpoint's health."""

from __future__ import annotations

from policies.health.endpoint_health import HealthEvent

SHUTDOWN = "shutdown"
"""The kind of failure of requests that end because the gateway stops."""
MODEL_GONE = "model_gone"
"""The kind of failure of an attempt at an engine that has dropped a model from its list."""

LOCAL_ERROR = "local_error"
"""The kind of failure of an attempt for which this process could not open a connection."""

REFUSED_FOR_NOW = ("status_429", "status_503")
"""The kinds of failure by which an engine or provider refuses requests for some time."""

# Failure kinds that count as something other than a failure of the engine.
_HEALTH_EVENTS = {
    "connect_failed": HealthEvent.CONNECT_FAILED,
    "connect_timeout": HealthEvent.CONNECT_FAILED,
    "timeout": HealthEvent.TIMED_OUT,
    "ejected": HealthEvent.IGNORED,
    "slow": HealthEvent.IGNORED,
    SHUTDOWN: HealthEvent.IGNORED,
    LOCAL_ERROR: HealthEvent.IGNORED,
    MODEL_GONE: HealthEvent.IGNORED,
    "status_429": HealthEvent.IGNORED,
    # vLLM sends 503 when its queue is full; a dead engine is detected by its /health.
    "status_503": HealthEvent.IGNORED,
}


class UpstreamError(Exception):
    """Raised if an engine's response is incomplete or missing.

    kind                kind of the failure: a label in metrics, which also decides how the failure
                        affects the endpoint's health
    was_sent            whether the request was written to a connection, so that the engine may have
                        run it
    was_new_connection  whether the connection was new and was lost before any byte of a response
    wait_s              seconds after which the engine accepts another request (Retry-After); None
                        if it did not say
    """

    def __init__(
        self, kind: str, message: str, *, was_sent: bool = True, wait_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.was_sent = was_sent
        self.wait_s = wait_s
        self.was_new_connection = False


def health_event(error: UpstreamError) -> HealthEvent:
    """Return how a failure affects the endpoint's health.

    The loss of a new connection before any byte of a response counts as a refused connection.
    """
    if error.was_new_connection:
        return HealthEvent.CONNECT_FAILED
    return _HEALTH_EVENTS.get(error.kind, HealthEvent.FAILED)
