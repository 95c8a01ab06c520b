"""The new process's side of a restart: take sockets and learned state from the process that it replaces."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from gateway.restart.channel import (
    ENVIRONMENT,
    VERSION,
    Booked,
    ChannelError,
    End,
    Offer,
    Ready,
    StateWanted,
    Stop,
    pack,
    read,
    receive_offer,
)
from gateway.restart.learned_state import Restorer, place_of
from policies.ledger import foreign

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

    from gateway.config import Config
    from gateway.http.listener_sockets import Sockets
    from gateway.route import Gateway

log = logging.getLogger("penstock")

OFFER_WITHIN_S = 30.0
STATE_WITHIN_S = 60.0
SOURCE = b"predecessor"


class Predecessor:
    """The process that this one replaces. It serves until `ready()`, and drains afterwards."""

    def __init__(self, channel: socket.socket, offer: Offer, sockets: list[socket.socket]) -> None:
        self._channel = channel
        self._offer = offer
        self._sockets = sockets
        self._reader: StreamReader | None = None
        self._writer: StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def secret(self) -> bytes | None:
        """What prompts' fingerprints are keyed with; None from a process of another version."""
        return self._offer.secret or None

    @property
    def activated(self) -> frozenset[str]:
        """Listeners whose sockets systemd opened."""
        return frozenset(each.name for each in self._offer.sockets if each.activated)

    def sockets(self, config: Config) -> Sockets:
        """Its listening sockets that this configuration still wants; the others are closed."""
        found: dict[str, tuple[socket.socket, ...]] = {}
        for bound, each in zip(self._offer.sockets, self._sockets, strict=False):
            wanted = getattr(config.listeners, bound.name, None)
            if wanted is not None and (bound.activated or (wanted.host, wanted.port) == (bound.host, bound.port)):
                each.setblocking(False)
                found[bound.name] = (*found.get(bound.name, ()), each)
            else:
                each.close()
        return found

    @property
    def is_alive(self) -> bool:
        """Whether it still drains."""
        return self._task is not None and not self._task.done()

    async def warm(self, gateway: Gateway, config: Config, secret: bytes) -> None:
        """Take the learned state. Whatever goes wrong, the process starts, cold. `secret` keys its prompts."""
        await self._connect()
        assert self._writer is not None
        warm = self._offer.version == VERSION
        self._writer.write(pack(StateWanted(warm)))
        if not warm:
            log.warning(
                "restart: process %d speaks version %d of the handover, and this one %d; starting cold",
                self._offer.pid,
                self._offer.version,
                VERSION,
            )
        began = monotonic()
        offer = self._offer
        restorer = Restorer(gateway, prefixes=(offer.secret, offer.block_bytes) == (secret, config.prefix.block_bytes))
        try:
            async with asyncio.timeout(STATE_WITHIN_S):
                await self._restore(restorer)
        except TimeoutError:
            log.warning("restart: the learned state did not come within %g s; going on with a part", STATE_WITHIN_S)
        except (ChannelError, ValueError) as error:
            log.warning("restart: the learned state cannot be taken (%s); going on with a part", error)
        if warm:
            log.info(
                "restart: took over from process %d in %.2f s: %d index blocks, %d endpoints, %d of them out",
                self._offer.pid,
                monotonic() - began,
                restorer.blocks,
                restorer.endpoints,
                restorer.ejected,
            )
        gateway.gate.refresh()

    async def _restore(self, restorer: Restorer) -> None:
        assert self._reader is not None
        while True:
            message = await read(self._reader)
            if isinstance(message, End):
                return
            if isinstance(message, StateWanted | Ready | Booked | Stop):
                raise ChannelError(f"{type(message).__name__} is no state")
            restorer.take(message)

    async def decline(self) -> None:
        """Take no state: this process keeps it elsewhere, or has no place for it."""
        await self._connect()
        assert self._writer is not None
        self._writer.write(pack(StateWanted(warm=False)))

    async def ready(self, gateway: Gateway | None = None) -> None:
        """This process accepts connections. From here on the predecessor drains."""
        assert self._writer is not None
        self._writer.write(pack(Ready()))
        with suppress(OSError):
            await self._writer.drain()
        self._task = asyncio.create_task(self._follow(gateway), name="follow the predecessor")

    async def stop(self, within_s: float) -> None:
        """Have it end too, and wait for that."""
        if self._writer is not None and self._task is not None and not self._task.done():
            self._writer.write(pack(Stop()))
            await asyncio.wait([self._task], timeout=within_s)
            self._task.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _connect(self) -> None:
        self._channel.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._channel)

    async def _follow(self, gateway: Gateway | None) -> None:
        """Count what it still has at the endpoints, until it ends."""
        assert self._reader is not None
        try:
            while True:
                message = await read(self._reader)
                if isinstance(message, Booked) and gateway is not None:
                    _book(gateway, message)
        except ChannelError:
            log.info("restart: process %d has ended", self._offer.pid)
        finally:
            if gateway is not None:
                _book(gateway, Booked([]))


def _book(gateway: Gateway, booked: Booked) -> None:
    now, shares = monotonic(), dict(booked.shares)
    changed = [foreign(live.load, SOURCE, shares.get(place_of(live)), now) for live in gateway.endpoints.all()]
    if any(changed):
        gateway.gate.refresh()


def find_predecessor(env: MutableMapping[str, str]) -> Predecessor | None:
    """The process that started this one to replace it, if one did. The variable is removed. Raise ChannelError."""
    fd = env.pop(ENVIRONMENT, "")
    if not fd.isdigit():
        return None
    try:
        channel = socket.socket(fileno=int(fd))
    except OSError as error:
        raise ChannelError(f"{ENVIRONMENT} names no socket: {error.strerror}") from None
    channel.set_inheritable(False)
    channel.settimeout(OFFER_WITHIN_S)
    return Predecessor(channel, *receive_offer(channel))
