"""The load generator, in processes of its own: `python -m bench.load.overload_load streams|knocks`, a Plan on stdin.

`streams` holds hundreds of long answers open and tells how they flowed. `knocks` sends everything else: independent
clients, who come again when refused, and small requests to a server that does nothing, which show what the machine
itself takes. Both write one JSON object to stdout. Not here: what is due when (bench/load/overload_plan.py).
"""

from __future__ import annotations

import asyncio
import gc
import sys
from bisect import bisect_left
from itertools import accumulate, pairwise
from random import Random
from time import monotonic

import msgspec

from bench.load.overload_client import Asked, Lines, request
from bench.load.overload_plan import (
    OPENED_S,
    OPENED_WITHIN_S,
    STREAM_OUTPUT,
    STREAM_PROMPT,
    STREAMS,
    Arrival,
    Plan,
    arrivals,
)

OBEDIENT_RETRIES = 2  # what OpenAI's SDKs do unless told otherwise
DEAF_RETRIES = 5
SHORT_BACKOFF_S, LONG_BACKOFF_S = 0.5, 8.0  # theirs, where nothing was said or nobody listens
LAST_RETRY_S = sum(
    min(LONG_BACKOFF_S, SHORT_BACKOFF_S * 2**number) for number in range(DEAF_RETRIES)
)
STILL_KNOCKS, STILL_EVERY_S = 400, 0.01
BUSY_STILL_EVERY_S = 0.1
LAST_WORDS_S = 10.0


class Try(msgspec.Struct):
    """One sending. Moments count from `Plan.begin_s`; `unread_s` is how long an answer that had come was not read."""

    due_s: float
    sent_s: float
    answered_s: float | None
    status: int | None
    id: str
    retry_after_s: float | None
    unread_s: float = 0.0


class Knock(msgspec.Struct):
    """One client's request: all its tries, and its answer, which is `whole`, or `cut` off by the end of the run."""

    number: int
    phase: int
    tries: list[Try]
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    whole: bool = False
    cut: bool = False


class Stream(msgspec.Struct):
    """One long answer. `tokens[i]`, `lasted_s[i]`: what came of it in phase i, and how long that took."""

    status: int | None
    broken: bool
    tokens: list[int]
    lasted_s: list[float]


class Knocks(msgspec.Struct):
    """What the second process saw. `idle_s`, `busy_s`: round trips to the server that does nothing, before the plan and
    during it (when, and how long)."""

    idle_s: list[float]
    busy_s: list[tuple[float, float]]
    knocks: list[Knock]


async def streams(plan: Plan) -> list[Stream]:
    """Open them one after the other, hold them to the plan's end."""
    lines, loop = Lines(plan.url), asyncio.get_running_loop()
    held, asked = [], []
    for at in range(STREAMS):
        await _until(plan.begin_s + OPENED_S + OPENED_WITHIN_S * at / STREAMS)
        asked.append(Asked(loop))
        wanted = request(STREAM_PROMPT, STREAM_OUTPUT, "stream", plan.seed, at)
        held.append(loop.create_task(lines.ask(wanted, asked[-1])))
    await _until(plan.ends_s)
    for task in held:
        task.cancel()
    lines.close()
    return [_stream(plan, one) for one in asked]


def _stream(plan: Plan, asked: Asked) -> Stream:
    """Its tokens by phase."""
    timeline, bounds = (
        asked.timeline,
        list(accumulate((phase.seconds for phase in plan.phases), initial=0.0)),
    )
    first_s = plan.ends_s if timeline.first_s is None else timeline.first_s
    moments = list(accumulate(timeline.gaps_s, initial=first_s - plan.begin_s))
    cuts = [bisect_left(moments, bound) for bound in bounds]
    parts = [moments[low:high] for low, high in pairwise(cuts)]
    lasted = [part[-1] - part[0] if part else 0.0 for part in parts]
    return Stream(asked.status, asked.ended.done(), [len(part) for part in parts], lasted)


class Door:
    """The independent clients of a plan. `knocks` is what became of them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lines, self._still = Lines(plan.url), Lines(plan.still_url)
        self._rng = Random(f"back-off {plan.seed}")
        self.knocks: list[Knock] = []

    async def idle(self) -> list[float]:
        """Round trips while nothing else happens."""
        for _ in range(20):  # code and connections warm up
            await self._round_trip()
        seen = []
        for _ in range(STILL_KNOCKS):
            await asyncio.sleep(STILL_EVERY_S)
            seen.append(await self._round_trip())
        return seen

    async def busy(self) -> list[tuple[float, float]]:
        """The same during the plan: when, and how long."""
        seen = []
        await _until(self._plan.begin_s)
        while (now := monotonic()) < self._plan.ends_s:
            seen.append((now - self._plan.begin_s, await self._round_trip()))
            await asyncio.sleep(BUSY_STILL_EVERY_S)
        return seen

    async def everybody(self) -> None:
        """All arrivals of the plan, each when it is due."""
        plan, tasks = self._plan, []
        for one in arrivals(plan.phases, plan.capacity_per_s, plan.seed):
            await _until(plan.begin_s + one.due_s)
            tasks.append(asyncio.create_task(self._client(one)))
        _, late = await asyncio.wait(tasks, timeout=plan.ends_s + LAST_WORDS_S - monotonic())
        for task in late:
            task.cancel()

    def close(self) -> None:
        self._lines.close()
        self._still.close()

    async def _round_trip(self) -> float:
        asked = Asked(asyncio.get_running_loop())
        await self._still.ask(request(500, 100, "still"), asked)
        assert asked.answered_s is not None, "the server that does nothing has gone"
        return asked.answered_s - asked.sent_s

    async def _client(self, one: Arrival) -> None:
        """Ask, and again as long as it is refused and has not had enough."""
        plan = self._plan
        obeys = plan.phases[one.phase].obey
        knock = Knock(one.number, one.phase, [])
        self.knocks.append(knock)
        wanted = request(one.prompt_tokens, one.output_tokens, plan.seed, one.number)
        due_s = plan.begin_s + one.due_s
        for number in range(1 + (OBEDIENT_RETRIES if obeys else DEAF_RETRIES)):
            await _until(due_s)
            asked = Asked(asyncio.get_running_loop())
            try:
                await self._lines.ask(wanted, asked)
            finally:
                self._note(knock, due_s, asked)
            if asked.status != 429:
                return
            wait_s = asked.retry_after_s if obeys else None
            if wait_s is None:
                wait_s = min(LONG_BACKOFF_S, SHORT_BACKOFF_S * 2**number) * (
                    1 - 0.25 * self._rng.random()
                )
            due_s = monotonic() + wait_s

    def _note(self, knock: Knock, due_s: float, asked: Asked) -> None:
        zero_s, timeline = self._plan.begin_s, asked.timeline
        answered_s = None if asked.answered_s is None else asked.answered_s - zero_s
        due_s, sent_s = due_s - zero_s, asked.sent_s - zero_s
        tried = Try(
            due_s, sent_s, answered_s, asked.status, asked.id, asked.retry_after_s, asked.unread_s
        )
        knock.tries.append(tried)
        if asked.status == 200 and timeline.first_s is not None and timeline.last_s is not None:
            knock.first_s, knock.last_s = timeline.first_s - zero_s, timeline.last_s - zero_s
            knock.tokens, knock.whole = timeline.tokens, timeline.done and timeline.error is None
            knock.cut = not asked.ended.done() or asked.ended.cancelled()


async def knocks(plan: Plan) -> Knocks:
    """First the idle machine, then everybody."""
    door = Door(plan)
    idle_s = await door.idle()
    busy = asyncio.create_task(door.busy())
    await door.everybody()
    found = Knocks(idle_s, await busy, door.knocks)
    door.close()
    return found


async def _until(moment_s: float) -> None:
    """Sleep until a moment of time.monotonic; not at all if it is over."""
    left_s = moment_s - monotonic()
    if left_s > 0:
        await asyncio.sleep(left_s)


def main() -> int:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    gc.freeze()
    gc.set_threshold(
        50_000, 50, 100
    )  # a pause of the measuring side would pass for one of the gateway
    part = {"streams": streams, "knocks": knocks}[sys.argv[1]]
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(part(plan))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
