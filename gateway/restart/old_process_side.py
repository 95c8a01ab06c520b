"""The old process's side of a restart: starts a successor, and passes sockets and state to it.

The old process serves as before until the successor reports that it accepts connections. If the
successor ends or takes too long, the old process simply continues.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from gateway.restart import systemd_notify
from gateway.restart.handover_channel import (
    FD_VARIABLE,
    VERSION,
    BoundListener,
    ChannelError,
    HandoverOffer,
    pack_message,
    read_message,
    send_offer,
)
from gateway.restart.handover_messages import (
    EndpointKey,
    LearnedState,
    RemainingWork,
    StateEnd,
    StateRequest,
    StopRequest,
    SuccessorReady,
)
from policies.engine.peer_load import PeerShare

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

log = logging.getLogger("penstock")

READY_TIMEOUT_S = 180.0
END_TIMEOUT_S = 10.0
REMAINING_WORK_INTERVAL_S = 0.25


class HandoverError(Exception):
    """Raised if the successor process did not become ready; the message gives the reason."""


def restart_command() -> list[str]:
    """Return the command line of this process, to start the successor with."""
    return [sys.executable, *sys.orig_argv[1:]]


class Successor:
    """The new process that replaces this one.

    sockets  the listening sockets to pass to it
    secret   the secret key with which prompts are hashed
    """

    def __init__(
        self,
        env: Mapping[str, str],
        sockets: Sequence[tuple[BoundListener, socket.socket]],
        secret: bytes,
    ) -> None:
        self._env = env
        self._sockets = sockets
        self._secret = secret
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: StreamReader | None = None
        self._writer: StreamWriter | None = None
        self.is_ready = False

    async def start(self, block_bytes: int, states: Callable[[], Iterable[LearnedState]]) -> None:
        """Start the successor process, and return once it accepts connections.

        If it does not become ready, it is ended, and HandoverError is raised.
        """
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._launch(block_bytes)
                await self._hand_over(states)
        except TimeoutError:
            raise HandoverError(
                f"the successor process was not ready within {READY_TIMEOUT_S:g} s"
            ) from None
        except (ChannelError, OSError) as error:
            raise HandoverError(await self._reason(error)) from None
        finally:
            if not self.is_ready:
                await self._abandon()
        systemd_notify.notify(
            self._env, f"MAINPID={self.pid}", "READY=1", f"STATUS=serving, pid {self.pid}"
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def _launch(self, block_bytes: int) -> None:
        own_end, their_end = socket.socketpair()
        fd = their_end.fileno()
        env = {**self._env, FD_VARIABLE: str(fd)}
        with their_end:
            self._process = await asyncio.to_thread(
                subprocess.Popen, restart_command(), env=env, pass_fds=(fd,)
            )
        offer = HandoverOffer(
            VERSION, os.getpid(), [bound for bound, _ in self._sockets], self._secret, block_bytes
        )
        send_offer(own_end, offer, [listener for _, listener in self._sockets])
        self._reader, self._writer = await asyncio.open_unix_connection(sock=own_end)

    async def _hand_over(self, states: Callable[[], Iterable[LearnedState]]) -> None:
        assert self._reader is not None
        assert self._writer is not None
        message = await read_message(self._reader)
        if isinstance(message, StateRequest):
            for state in states() if message.wants_state else ():
                self._writer.write(pack_message(state))
                await self._writer.drain()
                await asyncio.sleep(0)
            self._writer.write(pack_message(StateEnd()))
            message = await read_message(self._reader)
        if not isinstance(message, SuccessorReady):
            raise ChannelError(
                f"the successor process sent the message {type(message).__name__} before it "
                "reported that it was ready"
            )
        self.is_ready = True

    async def _reason(self, error: Exception) -> str:
        process = self._process
        if process is None:
            return f"cannot start the successor: {error}"
        with suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(process.wait, 1.0)
            return (
                f"the successor ended with code {code} before it was ready; its messages are above"
            )
        return f"the successor failed before it was ready: {error}"

    async def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)

    @asynccontextmanager
    async def keep_informed(
        self, shares: Callable[[], list[tuple[EndpointKey, PeerShare]]], stop: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Report the remaining work of this process to its successor during an `async with` block.

        The successor needs it to know the load of the endpoints.

        shares  function that returns the remaining work by endpoint
        stop    function that is called if the successor asks this process to end
        """
        tasks = [
            asyncio.create_task(self._send_remaining_work(shares), name="tell the successor"),
            asyncio.create_task(self._wait_for_stop(stop), name="listen to the successor"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_remaining_work(
        self, shares: Callable[[], list[tuple[EndpointKey, PeerShare]]]
    ) -> None:
        assert self._writer is not None
        while True:
            self._writer.write(pack_message(RemainingWork(shares())))
            with suppress(OSError):
                await self._writer.drain()
            await asyncio.sleep(REMAINING_WORK_INTERVAL_S)

    async def _wait_for_stop(self, stop: Callable[[], None]) -> None:
        assert self._reader is not None
        with suppress(ChannelError):
            while not isinstance(await read_message(self._reader), StopRequest):
                pass
            stop()

    def close(self) -> None:
        """Close the channel to the successor, which shows it that this process is about to end."""
        if self._writer is not None:
            self._writer.close()
