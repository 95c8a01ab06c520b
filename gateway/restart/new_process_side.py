"""The new process's side of a restart: takes sockets and learned state from the old process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from gateway.restart.handover_channel import (
    FD_VARIABLE,
    VERSION,
    ChannelError,
    HandoverOffer,
    pack_message,
    read_message,
    receive_offer,
)
from gateway.restart.handover_messages import (
    RemainingWork,
    StateEnd,
    StateRequest,
    StopRequest,
    SuccessorReady,
)
from gateway.restart.learned_state import Restorer, endpoint_key
from policies.load_ledger import set_peer_load

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

    from gateway.config import Config
    from gateway.drift.drift_monitor import DriftMonitor
    from gateway.http.listener_sockets import SocketsByName
    from gateway.routes_and_snapshot import Gateway

log = logging.getLogger("penstock")

OFFER_TIMEOUT_S = 30.0
STATE_TIMEOUT_S = 60.0
PEER_SOURCE = b"predecessor"


class Predecessor:
    """The process that this one replaces.

    It serves requests until report_ready() is called. Then it accepts no more connections, and ends
    when its requests have ended.
    """

    def __init__(
        self, channel: socket.socket, offer: HandoverOffer, sockets: list[socket.socket]
    ) -> None:
        self._channel = channel
        self._offer = offer
        self._sockets = sockets
        self._reader: StreamReader | None = None
        self._writer: StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def secret(self) -> bytes | None:
        """Return the key by which the old process hashes prompts; None if its protocol differs."""
        return self._offer.secret or None

    @property
    def activated_listeners(self) -> frozenset[str]:
        return frozenset(bound.name for bound in self._offer.sockets if bound.is_activated)

    def take_sockets(self, config: Config) -> SocketsByName:
        """Return the old process's listening sockets that `config` uses; close the others."""
        sockets_by_name: dict[str, tuple[socket.socket, ...]] = {}
        for bound, sock in zip(self._offer.sockets, self._sockets, strict=False):
            listener = getattr(config.listeners, bound.name, None)
            if listener is not None and (
                bound.is_activated or (listener.host, listener.port) == (bound.host, bound.port)
            ):
                sock.setblocking(False)
                sockets_by_name[bound.name] = (*sockets_by_name.get(bound.name, ()), sock)
            else:
                sock.close()
        return sockets_by_name

    @property
    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    async def restore_state(
        self, gateway: Gateway, config: Config, secret: bytes, drift: DriftMonitor | None = None
    ) -> None:
        """Restore the old process's learned state; `secret` is the key that hashes prompts here.

        After an error, this process continues with part of the state, or without it.
        """
        await self._connect()
        assert self._writer is not None
        warm = self._offer.version == VERSION
        self._writer.write(pack_message(StateRequest(warm)))
        if not warm:
            log.warning(
                "restart: process %d uses handover version %d, this process version %d; "
                "starting without learned state",
                self._offer.pid,
                self._offer.version,
                VERSION,
            )
        started_at = monotonic()
        offer = self._offer
        restorer = Restorer(
            gateway,
            drift,
            has_same_keys=(offer.secret, offer.block_bytes) == (secret, config.prefix.block_bytes),
        )
        await self._restore_within_timeout(restorer)
        restorer.finish()
        if warm:
            log.info(
                "restart: restored the state of process %d in %.2f s: "
                "%d index blocks, %d endpoints, %d of them out of rotation",
                self._offer.pid,
                monotonic() - started_at,
                restorer.blocks,
                restorer.endpoints,
                restorer.ejected,
            )
        gateway.gate.refresh()

    async def _restore_within_timeout(self, restorer: Restorer) -> None:
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                await self._restore(restorer)
        except TimeoutError:
            log.warning(
                "restart: the learned state did not arrive within %g s; continuing with part of it",
                STATE_TIMEOUT_S,
            )
        except (ChannelError, ValueError) as error:
            log.warning(
                "restart: cannot restore the learned state (%s); continuing with part of it", error
            )

    async def _restore(self, restorer: Restorer) -> None:
        assert self._reader is not None
        while True:
            message = await read_message(self._reader)
            if isinstance(message, StateEnd):
                return
            if isinstance(message, StateRequest | SuccessorReady | RemainingWork | StopRequest):
                raise ChannelError(
                    f"the old process sent an unexpected message ({type(message).__name__})"
                )
            restorer.restore(message)

    async def decline_state(self) -> None:
        """Ask the old process to send no learned state, because this process does not need it."""
        await self._connect()
        assert self._writer is not None
        self._writer.write(pack_message(StateRequest(wants_state=False)))

    async def report_ready(self, gateway: Gateway | None = None) -> None:
        """Report that this process accepts connections, so that the old one stops accepting."""
        assert self._writer is not None
        self._writer.write(pack_message(SuccessorReady()))
        with suppress(OSError):
            await self._writer.drain()
        self._task = asyncio.create_task(
            self._read_remaining_work(gateway), name="follow the predecessor"
        )

    async def stop(self, within_s: float) -> None:
        """Make the old process stop, and wait at most `within_s` seconds for its end."""
        if self._writer is not None and self._task is not None and not self._task.done():
            self._writer.write(pack_message(StopRequest()))
            await asyncio.wait([self._task], timeout=within_s)
            self._task.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _connect(self) -> None:
        self._channel.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._channel)

    async def _read_remaining_work(self, gateway: Gateway | None) -> None:
        # Account for the work that the predecessor still has at the endpoints, until it ends.
        assert self._reader is not None
        try:
            while True:
                message = await read_message(self._reader)
                if isinstance(message, RemainingWork) and gateway is not None:
                    _add_remaining_work(gateway, message)
        except ChannelError:
            log.info("restart: the predecessor (process %d) has ended", self._offer.pid)
        finally:
            if gateway is not None:
                _add_remaining_work(gateway, RemainingWork([]))


def _add_remaining_work(gateway: Gateway, remaining: RemainingWork) -> None:
    now, shares = monotonic(), dict(remaining.shares)
    changed = [
        set_peer_load(live.load, PEER_SOURCE, shares.get(endpoint_key(live)), now)
        for live in gateway.endpoints.all()
    ]
    if any(changed):
        gateway.gate.refresh()


def find_predecessor(env: MutableMapping[str, str]) -> Predecessor | None:
    """Return the process that started this one as its successor; None if there is none.

    The environment variable that identifies it is removed from `env`. Raises ChannelError.
    """
    fd = env.pop(FD_VARIABLE, "")
    if not fd.isdigit():
        return None
    try:
        channel = socket.socket(fileno=int(fd))
    except OSError as error:
        raise ChannelError(
            f"the file descriptor in the variable {FD_VARIABLE} is not a socket: {error.strerror}"
        ) from None
    channel.set_inheritable(False)
    channel.settimeout(OFFER_TIMEOUT_S)
    return Predecessor(channel, *receive_offer(channel))
