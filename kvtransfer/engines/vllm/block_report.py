"""BlockReport: reports to tests which blocks an engine has cached, from the engine's own block
pool.

KV events also report what an engine has cached; a test of KV events needs another source. A thread
answers every connection to a Unix socket with one JSON object and closes the connection:

    {"cached": [names of cached blocks, as KV events name them], "free": blocks not in use}

A name occurs as often as the pool has the block. The answer is exact while the engine is idle.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec


class PoolState(msgspec.Struct, frozen=True):
    """The blocks of an engine's KV pool.

    cached  names of the cached blocks, as KV events name them
    free    number of blocks that are not in use
    """

    cached: Sequence[int | str]
    free: int


class BlockReport:
    """Serves the state of a block pool on a Unix socket at `path`, until `close` is called.

    Every connection is answered with what `read` returns, as JSON. Only this user can connect.
    Raises OSError if the socket cannot be created.
    """

    def __init__(self, path: Path, read: Callable[[], PoolState]) -> None:
        self._path, self._read = path, read
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(path))
            path.chmod(0o600)
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        threading.Thread(target=self._serve, name="kv-block-report", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(msgspec.json.encode(self._read()))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)
