"""StoreService: serves a KV store to the processes of one host, on a Unix socket.

Each client has its own thread. When a connection ends, its leases end, and a block that it has not
sent completely is discarded. So a client that is killed leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvtransfer.store.block_keys import Key
from kvtransfer.store.block_store import BlockStore
from kvtransfer.store.slot_format import DIGEST_BYTES, digest_of
from kvtransfer.store.socket_io import (
    ConnectionEndedError,
    receive_exactly,
    receive_into,
    receive_message,
)
from kvtransfer.store.store_messages import (
    VERSION,
    AcquireBlocks,
    CountPrefix,
    FindPlaces,
    GetStats,
    Greeting,
    LeasedSlots,
    Places,
    PrefixCount,
    PutBlocks,
    ReleaseLease,
    StatsReport,
    StoredCount,
    StoreDescription,
    StoreProtocolError,
    ToClient,
    ToStore,
    UseBlocks,
    Wanted,
    decode_request,
    encode,
)

log = logging.getLogger("penstock")

_PEER = struct.Struct("3i")  # process, user and group of the other end
_DISCARD_BYTES = 1 << 16


class StoreService:
    """Serves one KV store to all processes of a user, and saves its blocks to disk meanwhile.

    Clients connect to a Unix socket. Only processes of the same user are served. Raises OSError if
    another service uses the socket.
    """

    def __init__(self, store: BlockStore, path: Path) -> None:
        self.store = store
        self._path = path
        self._lock_fd = _lock(path)
        try:
            self._listener = _listen(path)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._owners = itertools.count(1)
        self._clients: dict[int, socket.socket] = {}
        self._guard = threading.Lock()
        self._stopping = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._start(self._accept, "kv-store-accept")
        self._start(self._save, "kv-store-save")

    def _start(self, work: Callable[..., None], name: str, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        with self._guard:
            self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                # Out of descriptors, for example: wait until a client has left.
                log.warning("the KV store cannot accept a client: %s", error)
                self._stopping.wait(0.1)
                continue
            with self._guard:
                is_full = len(self._clients) >= self.store.options.max_clients
                owner = next(self._owners)
                if not is_full:
                    self._clients[owner] = connection
            if is_full or not _is_same_user(connection):
                self._forget(owner, connection)
            else:
                self._start(self._serve, f"kv-store-{owner}", owner, connection)

    def _save(self) -> None:
        while not self._stopping.wait(self.store.options.save_s):
            try:
                self.store.save_step()
            except Exception:
                log.exception("the KV store could not save blocks to disk")

    def _serve(self, owner: int, connection: socket.socket) -> None:
        try:
            client = _Client(self.store, owner, connection)
            client.greet()
            while True:
                client.answer(client.next_message())
        except (ConnectionEndedError, OSError):
            pass
        except StoreProtocolError as error:
            log.warning(
                "the KV store disconnects a client, which sent an invalid message: %s", error
            )
        except Exception:
            log.exception("the KV store failed to serve a client")
        finally:
            self.store.end_owner(owner)
            self._forget(owner, connection)
            with self._guard:
                self._threads.discard(threading.current_thread())

    def _forget(self, owner: int, connection: socket.socket) -> None:
        connection.close()
        with self._guard:
            self._clients.pop(owner, None)

    @property
    def clients(self) -> int:
        return len(self._clients)

    def close(self) -> None:
        """Disconnect all clients, save to disk what is in memory, and close the store."""
        self._stopping.set()
        _shut(self._listener)
        with self._guard:
            clients, threads = list(self._clients.values()), list(self._threads)
        for connection in clients:
            _shut(connection)
        for thread in threads:
            thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self.store.close()


class _Client:
    # One client's connection. Its messages are answered in order.

    def __init__(self, store: BlockStore, owner: int, connection: socket.socket) -> None:
        self._store, self._owner, self._connection = store, owner, connection

    def next_message(self) -> ToStore:
        # A client may be idle for any time between two messages, but not within one.
        connection, io_s = self._connection, self._store.options.io_s
        connection.settimeout(None)
        return decode_request(receive_message(connection, lambda: connection.settimeout(io_s)))

    def greet(self) -> None:
        self._connection.settimeout(self._store.options.io_s)
        message = decode_request(receive_message(self._connection))
        if not isinstance(message, Greeting) or message.version != VERSION:
            raise StoreProtocolError(
                f"the client did not greet with protocol version {VERSION}, which this store "
                "has; use the same version of both"
            )
        memory = self._store.memory
        described = encode(StoreDescription(VERSION, memory.geometry))
        socket.send_fds(self._connection, [described], [memory.fd])

    def answer(self, message: ToStore) -> None:
        store = self._store
        if isinstance(message, CountPrefix):
            self._send(PrefixCount(store.count_prefix(message.keys)))
        elif isinstance(message, FindPlaces):
            self._send(Places(store.places(message.keys)))
        elif isinstance(message, AcquireBlocks):
            self._send(LeasedSlots(*store.acquire(self._owner, message.keys)))
        elif isinstance(message, ReleaseLease):
            store.release(self._owner, message.lease)
        elif isinstance(message, UseBlocks):
            store.use(message.keys)
        elif isinstance(message, PutBlocks):
            self._put(message)
        elif isinstance(message, GetStats):
            self._send(StatsReport(store.stats()))
        else:
            raise StoreProtocolError("the client sent a second greeting; only the first is valid")

    def _put(self, message: PutBlocks) -> None:
        wanted = self._store.wanted(message.keys)
        self._send(Wanted(wanted))
        stored = 0
        for index in wanted:
            stored += self._receive(message.keys[index], message.lengths[index])
        self._store.use(message.keys)
        self._send(StoredCount(stored))

    def _receive(self, key: Key, length: int) -> bool:
        # Receive one block; return whether it is stored.
        digest = receive_exactly(self._connection, DIGEST_BYTES)
        data = self._store.begin_write(key, length)
        if data is None:
            _discard(self._connection, length)
            return False
        is_whole = False
        try:
            receive_into(self._connection, data)
            is_whole = digest_of([data]) == digest
        finally:
            data.release()
            self._store.end_write(key, length, digest if is_whole else None)
        return is_whole

    def _send(self, message: ToClient) -> None:
        self._connection.sendall(encode(message))


def _discard(connection: socket.socket, length: int) -> None:
    scratch = memoryview(bytearray(min(length, _DISCARD_BYTES)))
    while length:
        part = scratch[: min(length, _DISCARD_BYTES)]
        receive_into(connection, part)
        length -= len(part)


def _lock(path: Path) -> int:
    # Own the socket's path, and return the descriptor that keeps it.
    #
    # A socket that a killed service has left can then be removed without a race.
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise OSError(
            error.errno, f"another store already listens on {path}; stop it, or use another path"
        ) from None
    return fd


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_same_user(connection: socket.socket) -> bool:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(packed)[1] == os.geteuid())


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
