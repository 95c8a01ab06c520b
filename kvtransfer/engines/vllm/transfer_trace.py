"""TransferTrace: writes when layers of KV are computed and when they have arrived, for tests."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec


class TransferTrace:
    """Appends a line of JSON to a file when a layer of KV is computed or has arrived, for tests.

    Each line has `t`, the host's monotonic time in seconds. Raises OSError if the file cannot be
    opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, event: str, **members: object) -> None:
        line = msgspec.json.encode({"event": event, "t": time.monotonic(), **members})
        with self._lock:
            self._file.write(line + b"\n")
