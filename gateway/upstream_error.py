"""An engine's failure to answer: what broke, and what that says about its endpoint."""

from __future__ import annotations

from policies.health import Event

STOPPED = "shutdown"
"""The kind of what ends because the gateway does, not its engine."""
MODEL_GONE = "model_gone"
"""The kind of an attempt that ended because the engine no longer has the model that it listed."""

# Kinds that count as something else than a failure of the engine.
_EVIDENCE = {
    "connect_failed": Event.CONNECT_FAILED,
    "connect_timeout": Event.CONNECT_FAILED,
    "timeout": Event.TIMED_OUT,
    "ejected": Event.IGNORED,
    "slow": Event.IGNORED,
    STOPPED: Event.IGNORED,
    MODEL_GONE: Event.IGNORED,
    "status_429": Event.IGNORED,
    "status_503": Event.IGNORED,  # a full queue, says vLLM; a dead engine says it on /health
}


class UpstreamBroke(Exception):
    """The engine's answer is not whole. `kind` is the label in metrics and the evidence for health.

    sent   the request was written to a connection: the engine may have worked on it
    fresh  a new connection was lost soon after the request was sent, before any byte of an answer
    """

    def __init__(self, kind: str, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.kind = kind
        self.sent = sent
        self.fresh = False


def evidence(broke: UpstreamBroke) -> Event:
    """Return what a failure says about its endpoint; a lost new connection is as good as a refused one."""
    if broke.fresh:
        return Event.CONNECT_FAILED
    return _EVIDENCE.get(broke.kind, Event.FAILED)
