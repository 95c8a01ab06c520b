"""A queue that lets large request bodies be joined and parsed one at a time.

Parsing cannot be interrupted. It takes 0.2 ms per MiB of text, 0.8 of blanks, and up to 1.7 of
values that are nested. The memory for bodies is limited in admission/admission_controller.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from io import BytesIO
from time import monotonic, thread_time

LARGE_BODY = 256 * 1024  # bytes from which on a body waits for its turn
QUICK_S = 0.0045  # CPU time up to which a body has no consequences for its client
PAUSE_FACTOR = 400.0  # the pause after a slower body, as a multiple of its CPU time beyond QUICK_S
MAX_PAUSE_S = 20.0
MAX_CLIENTS = 4096
JOINED_AT_ONCE = 512 * 1024  # bytes of a body's pieces, about a quarter of a millisecond

JoinInTurn = Callable[[list[bytes]], Awaitable[bytes]]


async def join_pieces(pieces: list[bytes]) -> bytes:
    """Join the pieces of a large body over several loop iterations, and empty the list.

    Fresh memory for 30 MiB takes ten times as long as to copy them. The pieces are freed on the
    way, and the result is the buffer itself, so the body is never in memory twice.
    """
    joined, size = BytesIO(), 0
    pieces.reverse()
    while pieces:
        size += joined.write(pieces.pop())
        if size >= JOINED_AT_ONCE:
            size = 0
            await asyncio.sleep(0)
    return joined.getvalue()


class LargeBodies:
    """Schedules the parsing of large request bodies.

    Every large body is parsed in a loop iteration of its own. A client whose body held up that
    iteration for longer than QUICK_S waits before its next large body: 2.2 s after 10 ms, half a
    percent of the event loop's time. The pause begins with 0 at QUICK_S, because an ordinary image
    of 3 MB takes about 4 ms, and now and then a little more than 4.5. Joins are not counted: their
    steps are short.

    _paused_until  end of each client's pause (monotonic seconds)
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
        anything else: the CPU time until it does decides how long the client's pause is.
        """
        turn: asyncio.Lock | None = None
        try:
            while True:
                if turn is None and self._must_wait(client):
                    turn = await self._wait_for_pause(client)
                async with self._one_at_a_time:
                    await asyncio.sleep(0)
                    # Another body of the client may have been parsed meanwhile, and have begun a
                    # pause.
                    if turn is not None or not self._must_wait(client):
                        body = await join_pieces(pieces)
                        break
        except BaseException:
            self._end_turn(client, turn)
            raise
        asyncio.get_running_loop().call_soon(self._note_cost, client, thread_time(), turn)
        return body

    def _must_wait(self, client: str) -> bool:
        return self._paused_until.get(client, 0.0) > monotonic() or client in self._waiting

    async def _wait_for_pause(self, client: str) -> asyncio.Lock:
        # Wait until the pause of `client` is over. The client's next body waits until the returned
        # lock is released, when the cost of this one is known.
        turn = self._waiting.setdefault(client, asyncio.Lock())
        await turn.acquire()
        try:
            remaining_s = self._paused_until.get(client, 0.0) - monotonic()
            if remaining_s > 0:
                await asyncio.sleep(remaining_s + 0.001)
        except BaseException:
            self._end_turn(client, turn)
            raise
        return turn

    def _end_turn(self, client: str, turn: asyncio.Lock | None) -> None:
        if turn is not None:
            turn.release()
            # By then the next body, if any, has the lock.
            asyncio.get_running_loop().call_soon(self._remove_lock, client, turn)

    def _remove_lock(self, client: str, lock: asyncio.Lock) -> None:
        if not lock.locked() and self._waiting.get(client) is lock:
            del self._waiting[client]

    def _note_cost(self, client: str, cpu_before_s: float, turn: asyncio.Lock | None) -> None:
        # Begin the client's pause after a body that was begun at this CPU time of the thread.
        excess_s = thread_time() - cpu_before_s - QUICK_S
        if excess_s > 0.0:
            if len(self._paused_until) >= MAX_CLIENTS:
                self._paused_until.clear()
            self._paused_until[client] = monotonic() + min(MAX_PAUSE_S, PAUSE_FACTOR * excess_s)
        self._end_turn(client, turn)
