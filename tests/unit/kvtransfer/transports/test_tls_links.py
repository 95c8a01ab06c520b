"""Tests of connections over TLS: which certificates are accepted, and what is encrypted."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.transport_interface import Link, TransportError, WindowSlice, WindowVerdict
from kvtransfer.transports import tcp as tcp_module
from kvtransfer.transports.tcp import Tcp
from kvtransfer.transports.tls_links import TlsContexts, TlsLink
from kvtransfer.util.tls_files import TlsFiles
from tests.certificate_authority import Authority
from tests.contract.kvtransfer.links import (
    BLOCK_BYTES,
    BLOCKS,
    PATIENCE_S,
    Owner,
    linked_pair,
    until,
    window,
)

SIZE = BLOCKS * BLOCK_BYTES
WHOLE = ByteRuns(np.array([0]), np.array([0]), np.array([SIZE]))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def files(
    authority: Authority, name: str, *hosts: str, peer_name: str = "", expired: bool = False
) -> TlsFiles:
    certificate, key = authority.issue(name, *hosts, expired=expired)
    return TlsFiles(
        certificate=str(certificate), key=str(key), ca=str(authority.ca), peer_name=peer_name
    )


@pytest.fixture
def agent(authority: Authority) -> TlsFiles:
    return files(authority, "agent", "127.0.0.1", "kv.fleet")


@contextmanager
def two(
    source: TlsFiles | None, sink: TlsFiles | None
) -> Iterator[tuple[Tcp, Owner, Tcp, Owner, str]]:
    one, other, source_owner, sink_owner = Tcp(tls=source), Tcp(tls=sink), Owner(), Owner()
    try:
        address = one.start(source_owner, [])
        other.start(sink_owner, [])
        yield one, source_owner, other, sink_owner, address
    finally:
        for end in (one, other):
            end.close()


def exchange(source: TlsFiles | None, sink: TlsFiles | None) -> Link:
    # Send a message each way; return the link.
    #
    # Raises TransportError or AssertionError if the link fails.
    with two(source, sink) as (_, source_owner, other, sink_owner, address):
        link = other.dial(address)
        link.send(b"ping")
        until(
            lambda: (
                source_owner.all("message") or source_owner.all("lost") or sink_owner.all("lost")
            )
        )
        lost = [*source_owner.all("lost"), *sink_owner.all("lost")]
        if lost:
            raise TransportError(str(lost))
        source_owner.heard[0].link.send(b"pong")
        assert sink_owner.wait("message") == [b"pong"]
        assert source_owner.wait("message") == [b"ping"]
        return link


def test_two_ends_with_certificates_of_one_authority_link(agent: TlsFiles) -> None:
    link = exchange(agent, agent)
    assert isinstance(link, TlsLink)


@pytest.mark.parametrize(("source_has", "sink_has"), [(True, False), (False, True)])
def test_an_end_without_tls_and_one_with_it_do_not_link(
    source_has: bool, sink_has: bool, agent: TlsFiles
) -> None:
    with pytest.raises(TransportError):
        exchange(agent if source_has else None, agent if sink_has else None)


@pytest.mark.parametrize("stranger", ["source", "sink"])
def test_a_certificate_of_another_authority_is_refused(
    stranger: str, agent: TlsFiles, tmp_path: Path
) -> None:
    certificate, key = Authority(tmp_path / "other").issue("x", "127.0.0.1")
    strange = msgspec.structs.replace(agent, certificate=str(certificate), key=str(key))
    with pytest.raises(TransportError, match=r"certificate|unknown ca|unable to get"):
        exchange(*((strange, agent) if stranger == "source" else (agent, strange)))


def test_an_expired_certificate_is_refused(authority: Authority, agent: TlsFiles) -> None:
    with pytest.raises(TransportError, match="expired"):
        exchange(files(authority, "old", "127.0.0.1", expired=True), agent)


def test_a_peer_without_a_certificate_is_refused(agent: TlsFiles) -> None:
    with two(agent, None) as (_, source_owner, _, _, address):
        context = ssl.create_default_context(cafile=agent.ca)
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock,
            suppress(ssl.SSLError),
        ):
            wrapped = context.wrap_socket(sock, server_hostname=host)
            wrapped.sendall(b"hello")
            assert wrapped.recv(1) == b""
        assert "did not return a certificate" in str(source_owner.wait("lost")[0])


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_1_1_is_refused(agent: TlsFiles) -> None:
    with two(agent, None) as (_, source_owner, _, _, address):
        context = ssl.create_default_context(cafile=agent.ca)
        context.load_cert_chain(agent.certificate, agent.key)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as sock, pytest.raises(ssl.SSLError):
            context.wrap_socket(sock, server_hostname=host)
        source_owner.wait("lost")


def test_tls_1_2_is_spoken(agent: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    make = TlsContexts._context

    def limited(contexts: TlsContexts, protocol: int) -> ssl.SSLContext:
        context = make(contexts, protocol)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    monkeypatch.setattr(TlsContexts, "_context", limited)
    exchange(agent, agent)


def test_the_dialled_name_must_be_in_the_certificate(authority: Authority, agent: TlsFiles) -> None:
    with pytest.raises(TransportError, match=r"127\.0\.0\.1"):
        exchange(files(authority, "elsewhere", "10.0.0.1", "localhost"), agent)


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("advertise", [None, "::1", "[::1]"])
@pytest.mark.parametrize("is_encrypted", [True, False])
def test_an_ipv6_address_is_dialled_with_brackets_and_without(
    is_encrypted: bool, advertise: str | None, authority: Authority
) -> None:
    tls = files(authority, "six", "::1") if is_encrypted else None
    owner, listening = Owner(), Tcp("::1", advertise=advertise, tls=tls)
    dialling = Tcp("::1", tls=tls)
    try:
        address = listening.start(owner, [])
        dialling.start(Owner(), [])
        dialling.dial(address).send(b"ping")
        assert owner.wait("message") == [b"ping"]
    finally:
        for end in (listening, dialling):
            end.close()


@pytest.mark.parametrize("lacks", ["source", "sink", "none"])
def test_a_peer_name_is_checked_at_both_ends(lacks: str, authority: Authority) -> None:
    ends = [
        files(
            authority,
            f"end-{end}-{lacks}",
            "other.fleet" if end == lacks else "kv.fleet",
            peer_name="kv.fleet",
        )
        for end in ("source", "sink")
    ]
    if lacks == "none":
        exchange(*ends)
        return
    with pytest.raises(TransportError, match=r"kv\.fleet|closed"):
        exchange(*ends)


def test_files_are_read_again_for_new_links_and_old_links_go_on(
    authority: Authority, tmp_path: Path
) -> None:
    followed = copied(files(authority, "first", "127.0.0.1"), tmp_path)
    second = files(authority, "second", "127.0.0.1")
    with two(followed, followed) as (_, source_owner, other, _, address):
        before = other.dial(address)
        assert subject_of(before) == "first"
        shutil.copy(second.certificate, followed.certificate)
        assert subject_of(other.dial(address)) == "first"  # the key does not match yet
        shutil.copy(second.key, followed.key)
        assert subject_of(other.dial(address)) == "second"
        before.send(b"still here")
        assert source_owner.wait("message") == [b"still here"]


def test_an_authority_can_be_exchanged(
    authority: Authority, agent: TlsFiles, tmp_path: Path
) -> None:
    followed = copied(agent, tmp_path)
    new = Authority(tmp_path / "new")
    certificate, key = new.issue("n", "127.0.0.1")
    newcomer = TlsFiles(certificate=str(certificate), key=str(key), ca=str(authority.ca))
    with two(followed, newcomer) as (_, source_owner, other, _, address):
        with suppress(TransportError):
            other.dial(address)
        source_owner.wait("lost")
        Path(followed.ca).write_bytes(authority.ca.read_bytes() + new.ca.read_bytes())
        other.dial(address).send(b"ping")
        assert source_owner.wait("message") == [b"ping"]


def copied(these: TlsFiles, directory: Path) -> TlsFiles:
    names = {"certificate": these.certificate, "key": these.key, "ca": these.ca}
    return TlsFiles(**{name: shutil.copy(path, directory / name) for name, path in names.items()})


def subject_of(link: Link) -> str:
    assert isinstance(link, TlsLink)
    certificate = link._tls.getpeercert()
    assert certificate is not None
    return dict(part[0] for part in certificate["subject"])["commonName"]  # type: ignore[misc, index]


@pytest.mark.parametrize("which", ["certificate", "key", "ca"])
@pytest.mark.parametrize("wrong", ["missing", "garbage"])
def test_unusable_tls_files_are_named(
    which: str, wrong: str, agent: TlsFiles, tmp_path: Path
) -> None:
    path = tmp_path / "file.pem"
    if wrong == "garbage":
        path.write_text("not a certificate")
    with pytest.raises(TransportError, match=str(path)):
        Tcp(tls=msgspec.structs.replace(agent, **{which: str(path)}))


def test_an_encrypted_key_is_an_error_without_a_prompt(agent: TlsFiles, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as pem

    key = pem.load_pem_private_key(Path(agent.key).read_bytes(), None)
    path = tmp_path / "locked.key"
    locked = key.private_bytes(
        pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"secret")
    )
    path.write_bytes(locked)
    with pytest.raises(TransportError, match=r"locked\.key"):
        Tcp(tls=msgspec.structs.replace(agent, key=str(path)))


def test_a_silent_peer_delays_no_other_and_a_dial_times_out(
    agent: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_module, "_DIAL_S", 0.1)
    with two(agent, agent) as (_, source_owner, other, _, address):
        host, _, port = address.rpartition(":")
        with closing(socket.create_connection((host, int(port)))):
            source_owner.wait("linked")
            monkeypatch.setattr(tcp_module, "_DIAL_S", PATIENCE_S)
            other.dial(address).send(b"ping")
            assert source_owner.wait("message") == [b"ping"]
        with socket.create_server(("127.0.0.1", 0)) as mute:
            monkeypatch.setattr(tcp_module, "_DIAL_S", 0.1)
            with pytest.raises(TransportError, match="the TLS handshake with"):
                other.dial(f"127.0.0.1:{mute.getsockname()[1]}")


def test_an_end_that_closes_while_a_handshake_waits_ends_its_threads(agent: TlsFiles) -> None:
    with two(agent, agent) as (one, source_owner, _, _, address):
        host, _, port = address.rpartition(":")
        with closing(socket.create_connection((host, int(port)))):
            source_owner.wait("linked")
            link = source_owner.heard[0].link
            link.fence(1)
            assert source_owner.wait("fenced") == [1]
            one.close()
            assert not link._thread.is_alive()  # type: ignore[attr-defined]


def test_no_byte_of_a_window_or_message_is_seen_on_the_wire(agent: TlsFiles) -> None:
    pattern = b"the key and value of a token...." * 2
    received, lock = bytearray(), threading.Lock()

    def hear(data: bytes) -> None:
        with lock:
            received.extend(data)

    sink_region, source_region = (
        MemoryFileRegion.create(BLOCKS, BLOCK_BYTES, name=name) for name in ("into", "out-of")
    )
    source_region.bytes[:] = np.frombuffer(pattern * (SIZE // len(pattern)), np.uint8)
    with (
        two(agent, agent) as (_, source_owner, other, sink_owner, address),
        relay(address, hear) as through,
    ):
        link = other.dial(through)
        source_owner.wait("linked")
        far = source_owner.heard[0].link
        for end in (link, far):
            end.secure(bytes(32))
        sink_owner.place = lambda head: WindowSlice(WHOLE, sink_region, 0, 0)
        link.send(pattern)
        far.put(window(1, WHOLE), WindowSlice(WHOLE, source_region, 0, 0, lambda: True))
        assert sink_owner.wait("landed") == [(window(1, WHOLE), WindowVerdict.OK)]
        source_owner.wait("message")
        assert bytes(sink_region.bytes) == bytes(source_region.bytes)
        link.close()  # the relay thread ends when the link is closed
    assert len(received) > SIZE
    assert pattern not in received
    for region in (sink_region, source_region):
        region.close()


@contextmanager
def relay(address: str, hear: object) -> Iterator[str]:
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                hear(data)  # type: ignore[operator]
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))
        threads = [threading.Thread(target=copy, args=ends) for ends in ((near, far), (far, near))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        near.close()
        far.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    thread.join(PATIENCE_S)
    listener.close()


@pytest.mark.parametrize(
    "runs_of", [SIZE, 16384, 4096 + 24], ids=["one run", "records", "odd runs"]
)
def test_windows_dropped_before_a_slow_reader_end_as_stale_and_the_link_goes_on(
    runs_of: int,
) -> None:
    count = SIZE // runs_of
    starts = np.arange(count) * runs_of
    runs = ByteRuns(starts, starts, np.full(count, runs_of))
    with linked_pair("tls") as pair:
        is_held, go_on = threading.Event(), threading.Event()

        def slow(head: object) -> WindowSlice:
            is_held.set()
            assert go_on.wait(PATIENCE_S)
            return WindowSlice(runs, pair.sink_region, 0, 0)

        pair.sink_owner.place = slow  # type: ignore[assignment]
        for transfer in range(1, 9):
            pair.put(window(transfer, runs), runs)
        assert is_held.wait(PATIENCE_S)
        until(lambda: pair.source._out.is_blocked)  # type: ignore[attr-defined]
        sent = len(pair.source_owner.all("sent"))
        for transfer in range(1, 9):
            pair.source.drop(transfer)
        time.sleep(0.02)
        go_on.set()
        pair.source.send(b"after")
        assert pair.sink_owner.wait("message") == [b"after"]
        verdicts = [verdict for _, verdict in pair.sink_owner.all("landed")]  # type: ignore[misc]
        assert verdicts[:sent] == [WindowVerdict.OK] * sent
        assert verdicts[sent:] == [WindowVerdict.STALE]
        assert not pair.sink_owner.all("lost")
