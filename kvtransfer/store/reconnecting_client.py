"""StoreConnection: an engine's connection to a store, which is reopened if the store is
restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtransfer.store.client import StoreClient, StoreLostError

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
"""Seconds between attempts to reconnect to a lost store.

The first pause is FIRST_RETRY_S. Each further one is twice as long, up to LAST_RETRY_S.
"""

Result = TypeVar("Result")


class StoreConnection:
    """An engine's connection to a KV store, which is opened again after a loss.

    Without a store, calls return a default value, so the engine works on. Calls block; use one
    thread.

    path         path of the store's Unix socket
    block_bytes  maximum bytes of a block; a store that accepts only smaller ones counts as lost
    timeout_s    maximum seconds without a response
    warn         function called with one sentence when the store is lost
    lost_calls   number of calls that returned `if_lost`, because the store was lost
    """

    def __init__(
        self,
        path: Path,
        block_bytes: int,
        timeout_s: float = 10.0,
        warn: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._block_bytes, self._timeout_s = path, block_bytes, timeout_s
        self._warn, self._clock = warn, clock
        self._client: StoreClient | None = None
        self._is_warned = False
        self._retry_at_s, self._retry_s = float("-inf"), FIRST_RETRY_S
        self.lost_calls = 0

    def open(self) -> None:
        """Connect now. Raises StoreLostError if there is no store, or if its blocks are too
        small.
        """
        client = StoreClient(self._path, self._timeout_s)
        most = client.geometry.slot_bytes
        if self._block_bytes > most:
            client.close()
            raise StoreLostError(
                f"blocks of {self._block_bytes} bytes do not fit the store at {self._path}, whose "
                f"slots have {most}"
            )
        self._client = client

    def call(self, use: Callable[[StoreClient], Result], if_lost: Result) -> Result:
        """Return the result of use(client), a function that makes calls to the KV store.

        Returns `if_lost` if there is no connection, or if it is lost during the call.
        """
        try:
            if self._client is None:
                self._reopen()
            if self._client is not None:
                result = use(self._client)
                self._is_warned, self._retry_s = False, FIRST_RETRY_S
                return result
        except StoreLostError as error:
            self.close()
            if not self._is_warned:
                self._is_warned = True
                self._warn(f"KV is neither fetched nor saved: {error}")
        self.lost_calls += 1
        return if_lost

    def _reopen(self) -> None:
        now = self._clock()
        if now >= self._retry_at_s:
            self._retry_at_s = now + self._retry_s
            self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s)
            self.open()

    def close(self) -> None:
        """Close the connection to the KV store. A second call does nothing."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
