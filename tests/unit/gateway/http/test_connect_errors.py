"""Tests of which failures to connect count against an engine."""

from __future__ import annotations

import errno
import socket

import pytest

from gateway.http.connect_errors import connect_error_kind
from gateway.protocol.upstream_error import UpstreamError, health_event
from policies.health.endpoint_health import HealthEvent


@pytest.mark.parametrize(
    ("error", "kind", "event"),
    [
        (OSError(errno.EMFILE, "files"), "local_error", HealthEvent.IGNORED),
        (OSError(errno.EADDRNOTAVAIL, "no IPv6"), "connect_error", HealthEvent.FAILED),
        (socket.gaierror(socket.EAI_NONAME, "name"), "connect_error", HealthEvent.FAILED),
        (OSError(errno.ECONNREFUSED, "no"), "connect_failed", HealthEvent.CONNECT_FAILED),
    ],
)
def test_only_failures_that_the_engine_may_have_caused_count_against_it(
    error: OSError, kind: str, event: HealthEvent
) -> None:
    assert connect_error_kind(error) == kind
    assert health_event(UpstreamError(kind, "text", was_sent=False)) is event
