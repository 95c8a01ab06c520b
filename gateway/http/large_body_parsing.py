"""Joins and parses large request bodies one at a time, so that they do not block the event loop.

Parsing cannot be interrupted. Per MiB, it takes 0.2 ms for text, 0.8 ms for blanks and up to 1.7 ms
for nested values. admission/body_memory_budget.py limits the memory for bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from time import monotonic, thread_time

from gateway.http.large_body_allocation import BodyMemory, new_body, write_piece
from gateway.protocol.request.json_members import decode_object

LARGE_BODY = 256 * 1024  # bytes from which on a body waits for its turn
QUICK_S = 0.0045  # CPU time up to which a body has no consequences for its client
REFERENCE_S = 0.0002  # CPU time to parse 1 MiB of text on the machine for which QUICK_S was chosen
MAX_SLOWNESS = 4.0  # upper bound of the factor by which a machine counts as slower
PAUSE_FACTOR = 400.0  # pause after a slow body, as a multiple of its CPU time beyond QUICK_S
MAX_PAUSE_S = 20.0
MAX_CLIENTS = 4096
JOINED_AT_ONCE = 256 * 1024  # bytes joined per step, which takes about 0.15 ms

JoinInTurn = Callable[[list[bytes]], Awaitable[bytes]]


async def join_pieces(pieces: list[bytes]) -> bytes:
    """Join the pieces of a large body over several event loop iterations, and empty the list.

    Joining 30 MiB at once would block the event loop, as the kernel has to supply the memory pages.
    Pieces are freed on the way, so the body is never in memory twice.
    """
    size = sum(map(len, pieces))
    if size < 2:  # CPython shares bytes objects this short, so they must not be written to
        return b"".join(pieces)
    body, offset, copied = new_body(size), 0, 0
    pieces.reverse()
    while pieces:
        piece = pieces.pop()
        write_piece(body, offset, piece)
        offset += len(piece)
        copied += len(piece)
        if copied >= JOINED_AT_ONCE:
            copied = 0
            await asyncio.sleep(0)
    return body


def current_slowness() -> float:
    """Measure the factor by which parsing is slower now than on the reference machine; at least 1.

    The factor is two to three on a slower machine, or while other processes use its memory and
    caches. Limits on parsing times are multiplied by it, so that images still cause no wait.
    """
    text = _reference_text()
    began_s = thread_time()
    decode_object(text)
    return min(MAX_SLOWNESS, max(1.0, (thread_time() - began_s) / REFERENCE_S))


@cache
def _reference_text() -> bytes:
    return b'{"text":"' + b"a" * 2**20 + b'"}'


class LargeBodies:
    """Decides when large request bodies are parsed, so that parsing does not block other requests.

    Each large body is parsed in a separate event loop iteration. If that takes longer than QUICK_S,
    the client has to wait before its next large body is parsed. The wait is 2.2 s after 10 ms, so
    that the client uses half a percent of the event loop's time.

    Images cause no wait: one of 3 MB takes about 1.5 ms. A machine that is slow, or slowed by other
    processes, gets more time (current_slowness()).

    Two steps do not count, because they do not block: joining the pieces of a body, and sending it
    to the engine.

    memory         frees the bodies in steps
    _paused_until  end of each client's wait (monotonic seconds)
    _waiting       a lock per client, so that its bodies wait one after another
    """

    __slots__ = ("_one_at_a_time", "_paused_until", "_waiting", "memory")

    def __init__(self) -> None:
        self.memory = BodyMemory()
        self._one_at_a_time = asyncio.Lock()
        self._paused_until: dict[str, float] = {}
        self._waiting: dict[str, asyncio.Lock] = {}

    async def join_in_turn(self, client: str, pieces: list[bytes]) -> bytes:
        """Wait until a large body may be parsed; return the body, joined from its `pieces`.

        Bodies that wait take no further memory. The caller must parse the body before it awaits
        anything else: the CPU time until then decides how long the client has to wait before its
        next large body.
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
        self.memory.add(body)
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
        spent_s = thread_time() - cpu_before_s
        if spent_s > QUICK_S and (excess_s := spent_s - QUICK_S * current_slowness()) > 0.0:
            if len(self._paused_until) >= MAX_CLIENTS:
                self._paused_until.clear()
            self._paused_until[client] = monotonic() + min(MAX_PAUSE_S, PAUSE_FACTOR * excess_s)
        self._end_turn(client, turn)
