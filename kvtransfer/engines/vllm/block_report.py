"""BlockReport: reports to tests which KV blocks a vLLM engine has cached.

Tests compare the report with the engine's KV events, which should lead to the same result. A thread
answers each connection to a Unix socket with one JSON object, then closes the connection:

    {"cached": [names of cached blocks, as in KV events], "free": number of unused blocks}

A block that is cached twice is listed twice. The answer is exact while the engine is idle.
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
    """Answers connections to the Unix socket `path` with the state of a block pool, for tests.

    `read` returns the state, which is sent as JSON. Only processes of the same user can connect.

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
            except OSError:  # close() has closed the socket
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(msgspec.json.encode(self._read()))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)
