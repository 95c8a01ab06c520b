"""Tests of the detection of ports in use, and of URLs built from a host and a port."""

from __future__ import annotations

import errno
import socket

import pytest

from gateway.util.addresses import http_url, is_port_free


def test_a_port_is_taken_while_a_socket_listens_on_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not is_port_free("127.0.0.1", port)
    assert is_port_free("127.0.0.1", port)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EADDRNOTAVAIL])
def test_a_port_counts_as_free_if_listening_fails_for_another_reason(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert is_port_free("127.0.0.1", 80)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert http_url("::1", 80) == "http://[::1]:80"
    assert http_url("localhost", 80) == "http://localhost:80"
