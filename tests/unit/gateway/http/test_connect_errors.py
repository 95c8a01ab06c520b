"""Tests of which failures to connect count against an engine."""

from __future__ import annotations

import errno
import socket

import pytest

from gateway.http.connect_errors import NoFreePortError, connect_error_kind, lacks_port
from gateway.protocol.upstream_error import UpstreamError, health_event
from policies.health.endpoint_health import HealthEvent


@pytest.mark.parametrize(
    ("error", "kind", "event"),
    [
        (OSError(errno.EMFILE, "files"), "local_error", HealthEvent.IGNORED),
        (NoFreePortError(), "local_error", HealthEvent.IGNORED),
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


@pytest.mark.parametrize("has_address", [True, False])
def test_a_lack_of_ports_is_told_from_a_lack_of_an_own_address(
    monkeypatch: pytest.MonkeyPatch, has_address: bool
) -> None:
    error = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    class Socket(socket.socket):
        def connect(self, address: object) -> None:
            if not has_address:
                raise error
            super().connect(address)

    monkeypatch.setattr(socket, "socket", Socket)
    assert lacks_port(error, "127.0.0.1", 8000) is has_address
    assert not lacks_port(OSError(errno.ECONNREFUSED, "refused"), "127.0.0.1", 8000)
