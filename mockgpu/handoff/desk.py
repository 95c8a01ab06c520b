"""The desk: where a group's jobs hand their KV over and receive it, through an agent of kvtransfer.

Sole owner of the group's offers and landings. What a request asked for is said by its leg (legs.py), what becomes of
its blocks by the scheduler; here the two meet the agent. On the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol

import msgspec

from kvtransfer.ends import End, Reason, end
from mockgpu.blocks import blocks_for
from mockgpu.handoff.contract import AgentPort, LandingPort, OfferPort
from mockgpu.handoff.legs import Answering, Give, Offered, Take
from mockgpu.handoff.pace import Link
from mockgpu.handoff.tally import Tally
from mockgpu.job import Job, State
from mockgpu.scheduler import Scheduler

# How long a decline waits for an offer that may never come, where offers are known by name alone. Then it is called
# off, and the giver's agent remembers that: an offer that comes later still ends at once.
DECLINING_S = 1.0


class Owner(Protocol):
    """The group whose desk this is."""

    scheduler: Scheduler

    def wake(self) -> None:
        """There may be something to compute again."""
        ...

    def fail(self, job: Job, why: str) -> None:
        """The job's KV is lost, and it is not to be computed here."""
        ...

    def taken(self, job: Job, end: End) -> None:
        """A prefill leg whose answer waited for this: its KV has been taken, or will not be."""
        ...


class Directory(Protocol):
    """Who knows where the giving groups are."""

    async def address(self, take: Take) -> str:
        """The agent's address. UnknownPeerError when nobody knows."""
        ...

    def forget(self, take: Take) -> None:
        """That address did not serve."""
        ...

    async def renew(self, take: Take) -> str | None:
        """Have the lease renewed: the new ticket, or None when it is too late."""
        ...


class UnknownPeerError(Exception):
    """No address could be found for the group that has the KV."""


class Desk:
    """Offers what `Give` jobs leave behind, fetches what `Take` jobs need, and tells the scheduler how it ended."""

    def __init__(
        self,
        owner: Owner,
        agent: AgentPort,
        directory: Directory,
        link: Link,
        recompute: bool = False,
        lease_s: float = 30.0,
        connector: str = "nixl",
    ) -> None:
        """`recompute`: what to do when KV does not come; else the job fails. `link` paces what arrives.

        `lease_s` is as long as KV is kept here, and taken to be kept elsewhere; `connector` names the metrics.
        """
        self.agent = agent
        self.tally = Tally(connector)
        self._owner = owner
        self._directory = directory
        self._link = link
        self._recompute = recompute
        self._lease_s = lease_s
        self._offers: dict[Job, OfferPort] = {}
        self._landings: dict[Job, LandingPort] = {}
        self._keeping: dict[Job, asyncio.TimerHandle] = {}
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        """Offers, landings and declines that have not ended."""
        return len(self._tasks)

    def lines(self, labels: str) -> Iterator[str]:
        """The exposition of all that moves, and of what is held for others."""
        yield from self.tally.lines(labels)
        figures = self.agent.figures()
        yield "# TYPE mock:kv_leases gauge"
        for state, count in figures["leases"].items():
            yield f'mock:kv_leases{{{labels},state="{state}"}} {count}'
        yield "# TYPE mock:kv_unclaimed_seconds counter"
        yield f"mock:kv_unclaimed_seconds_total{{{labels}}} {figures['unclaimed_s']}"

    def giving(self, job: Job) -> bool | None:
        """Whether KV is on its way out; None once this job's offer has ended."""
        if job not in self._offers:
            return None
        leases = self.agent.figures()["leases"]
        return bool(leases["claimed"] + leases["moving"])

    def taking(self, job: Job) -> bool | None:
        """Whether KV is on its way in; None once this job waits for none."""
        if job.state is not State.FETCHING:
            return None
        return bool(self.agent.figures()["reservations"]["moving"])

    def lose(self, job: Job) -> None:
        """The KV just offered is gone, as when it had been evicted."""
        self._offers[job].revoke()

    def offer(self, job: Job) -> Offered:
        """Offer the prompt's KV of a job that has ended and kept its blocks."""
        give = job.leg
        assert isinstance(give, Give)
        blocks = self._owner.scheduler.kept[job][: blocks_for(job.prompt_tokens)]
        offer = self._offers[job] = self.agent.offer(
            give.name, blocks, job.prompt_tokens, ttl_s=give.hold_s, public=give.public
        )
        self._spawn(self._give(job, give, offer))
        return Offered(give.name, offer.ticket, blocks, job.prompt_tokens, max(0, job.cached))

    def renew(self, name: str, ticket: str) -> str | None:
        """Keep an offer for two thirds of a lease from now on: its new ticket. None for one that is not, or not so."""
        offer = next(
            (o for o in self._offers.values() if o.name == name and o.ticket == ticket), None
        )
        return offer.ticket if offer is not None and offer.renew(self._lease_s * 2 / 3) else None

    def queued(self, job: Job) -> None:
        """A job has come that may have to wait for room: its KV is to be kept for it."""
        if isinstance(job.leg, Take) and job.leg.renew and not job.leg.parked:
            # Six times in the lease's time, as vLLM's heartbeats.
            self._keeping[job] = asyncio.get_running_loop().call_later(
                self._lease_s / 6, self._keep, job
            )

    def _keep(self, job: Job) -> None:
        del self._keeping[job]
        self._spawn(self._renewed(job))

    async def _renewed(self, job: Job) -> None:
        """Renew the lease of a job that still stands in the queue."""
        assert isinstance(job.leg, Take)
        ticket = await self._directory.renew(job.leg)
        if ticket is not None and job.cached < 0 and job.state is State.WAITING:
            job.leg = msgspec.structs.replace(job.leg, ticket=ticket)
            self.queued(job)

    def _admitted(self, job: Job) -> None:
        timer = self._keeping.pop(job, None)
        if timer is not None:
            timer.cancel()

    def fetch(self, job: Job) -> None:
        """Begin to fetch the KV of a job just admitted; of one that found everything here only let the giver go."""
        take = job.leg
        assert isinstance(take, Take)
        self._admitted(job)
        if take.parked:
            return
        if job.state is State.FETCHING:
            self._spawn(self._take(job, take))
        else:
            job.cached = job.cached if take.cached is None else take.cached
            self.decline(take)

    def gone(self, job: Job) -> None:
        """The job is over before its time: stop what is under way, and let the other side go."""
        self._admitted(job)
        if job in self._landings:
            self._landings[job].cancel()
        elif isinstance(job.leg, Take) and job.cached < 0:
            # Never admitted, so it never asked for its KV.
            self.decline(job.leg)
        if (
            job in self._offers
            and isinstance(job.leg, Give)
            and job.leg.answering is Answering.WHEN_TAKEN
        ):
            self._offers[job].revoke()
        if isinstance(job.leg, Take) and job.leg.parked:
            self._free(job)

    def decline(self, take: Take) -> None:
        """Tell the giver that nobody will fetch this here, so that it need not wait."""
        if not take.parked and not self._closed:
            self._spawn(self._decline(take))

    def drop_all(self) -> None:
        """The engine died: nothing it offered or awaited is good any more."""
        for job in list(self._keeping):
            self._admitted(job)
        for offer in list(self._offers.values()):
            offer.revoke()
        for landing in list(self._landings.values()):
            landing.cancel()

    async def close(self) -> None:
        """End everything, and wait until every block is the engine's own again."""
        self._closed = True
        self.drop_all()
        await self.agent.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _give(self, job: Job, give: Give, offer: OfferPort) -> None:
        """An offer's life, until its blocks are free."""
        try:
            how = await offer.ended()
            self.tally.given(how)
            if how.landed:
                await self._link.pass_by(job.prompt_tokens)
        finally:
            del self._offers[job]
            self._free(job)
        if give.answering is Answering.WHEN_TAKEN:
            self._owner.taken(job, how)

    async def _take(self, job: Job, take: Take) -> None:
        """A landing's life, until the job can go on or its blocks are free."""
        began_s = asyncio.get_running_loop().time()
        try:
            how = await self._landed(job, take)
            if how.landed:
                await self._link.pass_by(job.prompt_tokens - job.cached)
            else:
                self._directory.forget(take)
            self.tally.took(how, asyncio.get_running_loop().time() - began_s)
            if job.state is State.FETCHING:
                self._arrived(job, take, how)
        finally:
            # What the job has let go of meanwhile is nobody's any more: nothing is written there now.
            self._free(job)

    def _arrived(self, job: Job, take: Take, how: End) -> None:
        """The job goes on with its KV, or without it as the policy says."""
        if how.landed:
            self._owner.scheduler.landed(
                job, job.prompt_tokens - 1 if take.cached is None else take.cached
            )
        elif self._recompute:
            self._owner.scheduler.recompute(job)
        else:
            self._owner.fail(job, f"KV load failed: {how.reason}")

    async def _landed(self, job: Job, take: Take) -> End:
        """Fetch, and wait for the end; afterwards nobody writes the job's blocks any more."""
        try:
            address = await self._directory.address(take)
        except UnknownPeerError as error:
            return unreachable(str(error))
        if job.state is not State.FETCHING:
            self.decline(take)
            return unreachable("aborted before it began")
        if self._closed:
            return unreachable("the engine is going down")
        landing = self._landings[job] = self.agent.fetch(
            address,
            take.name,
            job.blocks,
            job.prompt_tokens,
            ticket=take.ticket,
            skip_tokens=job.cached,
            timeout_s=take.wait_s,
        )
        try:
            return await landing.ended()
        finally:
            del self._landings[job]

    async def _decline(self, take: Take) -> None:
        try:
            address = await self._directory.address(take)
        except UnknownPeerError:
            return
        if self._closed:
            return
        # The memory has one block more than the scheduler knows: a single token fetched into it lets the giver go.
        spare = [self._owner.scheduler.pool.total]
        landing = self.agent.fetch(
            address, take.name, spare, 1, ticket=take.ticket, timeout_s=take.wait_s
        )
        calling_off = (
            None
            if take.ticket
            else asyncio.get_running_loop().call_later(DECLINING_S, landing.cancel)
        )
        await landing.ended()
        if calling_off is not None:
            calling_off.cancel()

    def _free(self, job: Job) -> None:
        self._owner.scheduler.let_go(job)
        self._owner.wake()

    def _spawn(self, life: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(life)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def unreachable(detail: str) -> End:
    """The end of what never began."""
    return end(Reason.UNREACHABLE, detail=detail)
