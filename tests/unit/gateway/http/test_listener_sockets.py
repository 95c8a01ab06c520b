"""Tests of listening sockets that systemd passes to the gateway, and of free ports.

Anything but a listening TCP socket is an error.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.http.listener_sockets import (
    ActivationError,
    bind,
    is_port_free,
    limit_receive_buffers,
    limit_send_buffers,
    sockets_from_systemd,
)
from gateway.restart import systemd_notify

ROOT = Path(__file__).parents[4]
PROGRAM = """
import os, sys
from gateway.http.listener_sockets import sockets_from_systemd
pid, count, names = sys.argv[1:]
env = {"LISTEN_PID": pid or str(os.getpid()), "LISTEN_FDS": count, "LISTEN_FDNAMES": names}
found = sockets_from_systemd(env)
assert not env
assert not any(os.get_inheritable(listener.fileno()) for own in found.values() for listener in own)
print(*(f"{name}={listener.getsockname()[1]}" for name, own in found.items() for listener in own))
"""


def assigned_ports(names: str, *listeners: socket.socket, pid: str = "") -> dict[str, int]:
    # Run sockets_from_systemd in a process with these sockets from descriptor 3 on.
    #
    # Returns the port of each socket by name. Raises ActivationError if the process does.
    redirections = " ".join(
        f"{3 + number}<&{listener.fileno()}" for number, listener in enumerate(listeners)
    )
    command = ["bash", "-c", f'exec "$@" {redirections}', "bash", sys.executable, "-c", PROGRAM]
    fds = [listener.fileno() for listener in listeners]
    done = subprocess.run(
        [*command, pid, str(len(listeners)), names],
        pass_fds=fds,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if "ActivationError" in done.stderr:
        raise ActivationError(done.stderr.strip().rsplit("ActivationError: ")[-1])
    assert not done.returncode, done.stderr
    return {
        name: int(port)
        for name, _, port in (listener.partition("=") for listener in done.stdout.split())
    }


def port(listener: socket.socket) -> int:
    number: int = listener.getsockname()[1]
    return number


@pytest.fixture
def two() -> Iterator[tuple[socket.socket, socket.socket]]:
    with bind("127.0.0.1", 0)[0] as one, bind("127.0.0.1", 0)[0] as other:
        yield one, other


def test_names_assign_sockets_to_listeners(two: tuple[socket.socket, socket.socket]) -> None:
    one, other = two
    assert assigned_ports("admin:api", one, other) == {"admin": port(one), "api": port(other)}
    assert assigned_ports("admin", one) == {"admin": port(one)}


@pytest.mark.parametrize("names", ["", "penstock.socket:penstock.socket", "api:metrics"])
def test_without_listener_names_the_order_decides(
    two: tuple[socket.socket, socket.socket], names: str
) -> None:
    assert assigned_ports(names, *two) == {"api": port(two[0]), "admin": port(two[1])}


def test_sockets_of_another_process_are_ignored(two: tuple[socket.socket, socket.socket]) -> None:
    assert assigned_ports("api", two[0], pid="1") == {}
    assert sockets_from_systemd({}) == {}


def test_a_socket_that_does_not_listen_is_an_error() -> None:
    with (
        socket.socket() as idle,
        pytest.raises(ActivationError, match="is not a listening TCP socket"),
    ):
        assigned_ports("api", idle)


def test_three_sockets_without_names_are_an_error(two: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ActivationError, match="passed 3 sockets"):
        assigned_ports("", *two, two[0])


def test_a_host_with_two_addresses_is_bound_on_both_with_one_port() -> None:
    bound = bind("localhost", 0)
    assert len({port(bound_socket) for bound_socket in bound}) == 1
    for bound_socket in bound:
        bound_socket.close()


def test_a_port_in_use_leaves_nothing_bound(two: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", port(two[0]))


def test_a_client_that_never_reads_fills_a_quarter_of_its_send_buffer() -> None:
    listener = bind("127.0.0.1", 0)[0]
    limit_send_buffers([listener], 256 * 1024)
    listener.setblocking(True)
    with listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        accepted = listener.accept()[0]
        with accepted:
            accepted.setblocking(False)
            taken = 0
            with suppress(BlockingIOError):
                while taken < 2**24:
                    taken += accepted.send(bytes(16 * 1024))
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 256 * 1024
    assert 32 * 1024 < taken < 128 * 1024


def test_the_kernel_keeps_few_bytes_of_a_client_that_is_not_read() -> None:
    (listener,) = bind("127.0.0.1", 0)
    limit_receive_buffers([listener], 256 * 1024)
    listener.setblocking(True)
    with listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.connect(listener.getsockname())
        accepted = listener.accept()[0]
        with accepted:
            client.settimeout(0.2)
            sent = 0
            with suppress(TimeoutError):
                while sent < 2**24:
                    sent += client.send(bytes(16 * 1024))
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 256 * 1024
    assert sent < 512 * 1024


def test_the_kernel_keeps_few_bytes_of_a_client_that_is_read_with_pauses() -> None:
    (listener,) = bind("127.0.0.1", 0)
    limit_receive_buffers([listener], 256 * 1024)
    listener.setblocking(True)
    with listener, socket.socket() as client:
        client.connect(listener.getsockname())
        accepted = listener.accept()[0]
        client.setblocking(False)
        accepted.setblocking(False)
        with accepted:
            for _ in range(200):  # the kernel enlarges the buffer of a connection that is read
                with suppress(BlockingIOError):
                    while True:
                        client.send(bytes(256 * 1024))
                with suppress(BlockingIOError):
                    while True:
                        accepted.recv(256 * 1024)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 256 * 1024


def test_a_closed_listener_is_skipped_by_a_new_limit() -> None:
    listener = bind("127.0.0.1", 0)[0]
    listener.close()
    limit_send_buffers([listener], 256 * 1024)
    limit_receive_buffers([listener], 256 * 1024)


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_notified_at_its_socket(tmp_path: Path, abstract: bool) -> None:
    path = f"@penstock-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + path[1:] if abstract else path)
        assert systemd_notify.report_ready({"NOTIFY_SOCKET": path})
        assert manager.recv(1000).startswith(b"READY=1\nSTATUS=serving")
        assert systemd_notify.report_reloading({"NOTIFY_SOCKET": path})
        assert manager.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")


def test_without_a_service_manager_notify_returns_false(tmp_path: Path) -> None:
    assert not systemd_notify.report_ready({})
    assert not systemd_notify.report_ready({"NOTIFY_SOCKET": str(tmp_path / "missing")})


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
        raise OSError(number, "the test refuses to bind the port")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert is_port_free("127.0.0.1", 80)
