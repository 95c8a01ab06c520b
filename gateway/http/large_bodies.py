"""A queue that lets large request bodies be joined and parsed one at a time.

Parsing cannot be interrupted. It takes 0.2 ms per MiB of text, 0.8 of blanks, and up to 1.7 of
values that are nested. The memory for bodies is limited in admission/controller.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from io import BytesIO
from time import monotonic, thread_time

LARGE_BODY = 256 * 1024  # bytes from which on a body waits for its turn
QUICK_S = 0.005  # CPU time up to which parsing a body has no consequences for its client
PAUSE_FACTOR = 200.0  # the pause after a slower body, as a multiple of the CPU time of all of it
MAX_PAUSE_S = 20.0
MAX_CLIENTS = 4096
JOINED_AT_ONCE = 512 * 1024  # bytes of a body's pieces, about a quarter of a millisecond

JoinInTurn = Callable[[list[bytes]], Awaitable[bytes]]


async def join_pieces(pieces: list[bytes]) -> tuple[bytes, float]:
    """Join the pieces of a large body over several loop iterations, and empty the list.

    Returns the body and the seconds of CPU time that this took.

    Fresh memory for 30 MiB takes ten times as long as to copy them. The pieces are freed on the
    way, and the result is the buffer itself, so the body is never in memory twice.
    """
    joined, size, cpu_s = BytesIO(), 0, 0.0
    pieces.reverse()
    began_s = thread_time()
    while pieces:
        size += joined.write(pieces.pop())
        if size >= JOINED_AT_ONCE:
            size = 0
            cpu_s += thread_time() - began_s
            await asyncio.sleep(0)
            began_s = thread_time()
    return joined.getvalue(), cpu_s + thread_time() - began_s


class LargeBodies:
    """Schedules the parsing of large request bodies.

    Every large body is parsed in a loop iteration of its own. A client whose body took long to
    parse waits before its next large body, so that such bodies of one client take at most half a
    percent of the event loop's time, their joins included. Ordinary images are parsed quickly, and
    their joins are short steps that delay nothing else.

    _paused_until  end of each client's pause (monotonic seconds); no entry after a quick body
    _waiting       a lock per client, so that its bodies wait for the pause one after another
    """

    __slots__ = ("_one_at_a_time", "_paused_until", "_waiting")

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._paused_until: dict[str, float] = {}
        self._waiting: dict[str, asyncio.Lock] = {}

    async def join_in_turn(self, client: str, pieces: list[bytes]) -> bytes:
        """Return a large body of `client`, joined from `pieces`, when the caller may parse it.

        Only the body whose turn it is is joined, so that waiting bodies take no further memory and
        joins do not add up in one iteration. The caller must parse the body before it awaits
        anything else: the CPU time until then decides whether the client has a pause.
        """
        while True:
            may_parse = self._must_wait(client)
            if may_parse:
                await self._wait_for_pause(client)
            async with self._one_at_a_time:
                await asyncio.sleep(0)
                # Another body of the client may have been parsed meanwhile, and have begun a pause.
                if may_parse or not self._must_wait(client):
                    body, cpu_s = await join_pieces(pieces)
                    break
        asyncio.get_running_loop().call_soon(self._note_cost, client, thread_time(), cpu_s)
        return body

    def _must_wait(self, client: str) -> bool:
        return self._paused_until.get(client, 0.0) > monotonic() or client in self._waiting

    async def _wait_for_pause(self, client: str) -> None:
        # Wait until the pause of `client` is over; its bodies wait for that one after another.
        lock = self._waiting.setdefault(client, asyncio.Lock())
        async with lock:
            remaining_s = self._paused_until.get(client, 0.0) - monotonic()
            if remaining_s > 0:
                await asyncio.sleep(remaining_s + 0.001)
            asyncio.get_running_loop().call_soon(self._remove_lock, client, lock)
            # The next body waits at least until the cost of this one is known.
            self._paused_until[client] = monotonic() + PAUSE_FACTOR * QUICK_S

    def _remove_lock(self, client: str, lock: asyncio.Lock) -> None:
        if not lock.locked() and self._waiting.get(client) is lock:
            del self._waiting[client]

    def _note_cost(self, client: str, parsed_from_s: float, join_s: float) -> None:
        # Pause the client if its body took longer than QUICK_S of CPU time to parse.
        #
        # `parsed_from_s` is the thread's CPU time before that, `join_s` what the join took.
        parse_s = thread_time() - parsed_from_s
        if parse_s > QUICK_S:
            if len(self._paused_until) >= MAX_CLIENTS:
                self._paused_until.clear()
            pause_s = min(MAX_PAUSE_S, PAUSE_FACTOR * (join_s + parse_s))
            self._paused_until[client] = monotonic() + pause_s
