"""Looks up the host name of an engine, and connects to the first address that accepts.

A name is looked up for each new connection, because its addresses change when an engine moves. A
slow or failed resolver says nothing about the engine. Then the addresses of the last lookup are
tried first, and the result of the running lookup after them. All addresses are forgotten if the
resolver says that the name does not exist: another server may have them by now. If a name has
several addresses, each gets only a part of the time to connect.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from time import monotonic
from typing import Any, TypeVar

from gateway.http.connect_errors import (
    NoFreePortError,
    is_local_error,
    is_process_error,
    lacks_port,
)
from gateway.http.eager_task import timeout_after

log = logging.getLogger("penstock")

PATIENCE_S = 0.1
"""Seconds from the start of a lookup after which the addresses of the last one are used."""

RECENT_S = 30.0
"""Seconds for which addresses count as recent; after that they are used OLD_PATIENCE_S later."""

OLD_PATIENCE_S = 0.5
"""The same as PATIENCE_S for older addresses, unless the last lookup failed."""

AVOID_S = 30.0
"""Seconds for which an address that accepted no connection is tried after all others."""

_NO_SUCH_NAME = frozenset(
    getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)
)

Address = tuple[socket.AddressFamily, Any]
"""The family of an address, and the address with its port as sockets take it."""

Lookup = Callable[[str, int], Awaitable[Sequence[Address]]]
"""A function that returns the addresses of a host name. It raises OSError if there are none."""

ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)


async def look_up(host: str, port: int) -> Sequence[Address]:
    """Return the addresses of a host name, looked up with the system's resolver.

    Raises OSError if the name has no address or no DNS server responds.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


class EngineAddresses:
    """The network addresses of one engine's host, which was given as an address or as a name."""

    __slots__ = (
        *("_failed_at", "_found_at", "_known", "_look_up", "_lookup", "_problem", "_started_at"),
        *("host", "is_literal", "port"),
    )

    def __init__(self, host: str, port: int, look_up: Lookup = look_up) -> None:
        self.host, self.port = host, port
        self.is_literal = _is_address(host)
        self._look_up = look_up
        self._known: Sequence[Address] = ()
        self._problem: OSError | None = None  # of the last lookup
        self._lookup: asyncio.Task[None] | None = None  # the one that is running
        self._started_at = self._found_at = 0.0  # times of the newest lookup, and of _known
        self._failed_at: dict[Any, float] = {}

    async def connect(
        self, factory: Callable[[], ProtocolT], lookup_s: float, connect_s: float, **settings: Any
    ) -> tuple[asyncio.Transport, ProtocolT]:
        """Open a connection to the engine's host, and return its transport and its protocol.

        factory    creates the protocol object
        lookup_s   maximum seconds to find an address of the host name
        connect_s  maximum seconds to connect after that
        settings   further arguments of the event loop's create_connection()

        Raises OSError: a gaierror if no address was found in time, and a TimeoutError if no
        connection was opened in time.
        """
        if self.is_literal:
            async with timeout_after(connect_s):
                return await self._connect_literal(factory, settings)
        lookup = await self._find(lookup_s)
        async with timeout_after(connect_s):
            sock = await self._open_socket(lookup, monotonic() + connect_s)
            try:
                loop = asyncio.get_running_loop()
                return await loop.create_connection(factory, sock=sock, **settings)
            except BaseException:
                sock.close()
                raise

    async def _connect_literal(
        self, factory: Callable[[], ProtocolT], settings: dict[str, Any]
    ) -> tuple[asyncio.Transport, ProtocolT]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_connection(factory, self.host, self.port, **settings)
        except OSError as error:
            if lacks_port(error, self.host, self.port):
                raise NoFreePortError from None
            raise

    async def _open_socket(self, lookup: asyncio.Task[None], until: float) -> socket.socket:
        # Return a socket that is connected to the first address that accepts it.
        #
        # While `lookup` is running, the last known addresses leave it and its result some time.
        tried = set[Any]()
        problem: OSError | None = None
        try:
            while untried := [found for found in self._ordered() if found[1] not in tried]:
                family, address = untried[0]
                tried.add(address)
                shares = len(untried) + (not lookup.done())
                try:
                    async with timeout_after((until - monotonic()) / shares):
                        return await _connected_socket(family, address)
                except OSError as error:  # includes TimeoutError
                    problem = self._note_failure(problem, error, address)
                if len(untried) == 1 and not is_process_error(problem):
                    await asyncio.wait([lookup], timeout=(until - monotonic()) / 2)
            raise problem or OSError(f"the host name {self.host} has no address")
        finally:
            del problem  # its traceback refers to this frame: a cycle

    def _ordered(self) -> list[Address]:
        # Return the known addresses; those that accepted no connection lately come last.
        avoided = monotonic() - AVOID_S
        failed_at = self._failed_at
        return sorted(self._known, key=lambda found: failed_at.get(found[1], avoided) > avoided)

    def _note_failure(self, problem: OSError | None, error: OSError, address: Any) -> OSError:
        # Record that an address failed; return what to report of it and of those tried before.
        #
        # An address that this machine cannot use hides no refusal by another one.
        if not is_process_error(error):
            self._failed_at[address] = monotonic()
        return error if problem is None or not is_local_error(error) else problem

    async def _find(self, lookup_s: float) -> asyncio.Task[None]:
        # Wait until an address is known; return a lookup that is running or has just ended.
        now = monotonic()
        if self._lookup is None:
            self._started_at = now
            name = f"look up {self.host}"
            self._lookup = asyncio.create_task(self._refresh(), name=name)
        lookup, wait_s = self._lookup, lookup_s
        if self._known:
            is_recent = now - self._found_at < RECENT_S or self._problem is not None
            patience_s = PATIENCE_S if is_recent else OLD_PATIENCE_S
            wait_s = min(wait_s, max(0.0, self._started_at + patience_s - now))
        await asyncio.wait([lookup], timeout=wait_s)
        if self._known:
            return lookup
        if self._problem is not None and lookup.done():
            # A new one: the traceback of a shared exception would grow with each request.
            raise type(self._problem)(*self._problem.args)
        message = f"the resolver did not answer within {wait_s:.2g} s"
        raise socket.gaierror(socket.EAI_AGAIN, message)

    async def _refresh(self) -> None:
        # Look the name up, and keep its addresses, or the problem if there are none.
        try:
            found = await self._look_up(self.host, self.port)
        except (OSError, UnicodeError) as failure:  # UnicodeError: no valid host name
            error = failure if isinstance(failure, OSError) else _no_such_name(failure)
            if error.errno in _NO_SUCH_NAME:
                self._known = ()
            elif self._known and self._problem is None:
                log.warning(
                    "the host name %s cannot be resolved, so its last known addresses are used: %s",
                    self.host,
                    error,
                )
            self._problem = error.with_traceback(None)
        else:
            self._known, self._problem, self._found_at = found, None, monotonic()
            kept = {address for _, address in found}
            self._failed_at = {at: when for at, when in self._failed_at.items() if at in kept}
        finally:
            self._lookup = None


async def _connected_socket(family: socket.AddressFamily, address: Any) -> socket.socket:
    # uvloop's sock_connect() is not used: it needs a thread of those that look names up.
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        try:
            sock.connect(address)
        except BlockingIOError:
            await _until_writable(sock)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error)) from None
    except OSError as error:
        sock.close()
        if lacks_port(error, *address[:2]):
            raise NoFreePortError from None
        raise
    except BaseException:
        sock.close()
        raise
    return sock


async def _until_writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_writable = asyncio.Event()
    loop.add_writer(sock, is_writable.set)
    try:
        await is_writable.wait()
    finally:
        loop.remove_writer(sock)


def _no_such_name(error: UnicodeError) -> OSError:
    return socket.gaierror(socket.EAI_NONAME, str(error))


def _is_address(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
