"""Whether a port is taken, and what is left for the listener to say."""

from __future__ import annotations

import errno
import socket

import pytest

from gateway.ports import http_url, is_free


def test_a_port_is_taken_while_somebody_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EADDRNOTAVAIL])
def test_a_port_that_nobody_has_taken_is_free_whatever_else_is_wrong(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener there tells the truth: that this user may not, or that the address is another machine's."""

    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert is_free("127.0.0.1", 80)


def test_an_address_of_version_6_stands_in_brackets() -> None:
    assert http_url("::1", 80) == "http://[::1]:80"
    assert http_url("localhost", 80) == "http://localhost:80"
