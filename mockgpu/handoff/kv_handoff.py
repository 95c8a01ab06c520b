"""KvHandoff: passes the KV of split requests from one mock engine to another.

After a prefill, the engine offers the KV: it stays in memory until another engine has fetched it.
For a decode job, the engine fetches the KV. A job's leg (mockgpu/split_legs.py) says which of the
two is needed. The library kvtransfer moves the bytes. The scheduler owns the KV blocks. All code
runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol

import msgspec

from kvtransfer.protocol.outcomes import EndReason, TransferOutcome, outcome_for
from mockgpu.handoff.interfaces import AgentPort, LandingPort, OfferPort
from mockgpu.handoff.link_speed import PacedLink
from mockgpu.handoff.transfer_counters import HandoffStats
from mockgpu.paged_kv_cache import blocks_for
from mockgpu.scheduler import Job, JobState, Scheduler
from mockgpu.split_legs import AnswerTime, DecodeLeg, OfferedKv, PrefillLeg

# Seconds for which a refused request waits for its offer, which is known by name only and may never
# arrive. Then it cancels the offer: the other agent ends it at once if it is made later.
DECLINE_S = 1.0


class HandoffOwner(Protocol):
    """The part of a mock engine that KvHandoff uses, to report sent or received KV."""

    scheduler: Scheduler

    def wake(self) -> None:
        """Compute steps again, because a job or free blocks may have become available."""
        ...

    def fail_job(self, job: Job, reason: str) -> None:
        """Fail a job whose KV is lost, and which this engine may not compute itself."""
        ...

    def on_blocks_taken(self, job: Job, end: TransferOutcome) -> None:
        """End a prefill job whose response had to wait until its KV was fetched."""
        ...


class PeerDirectory(Protocol):
    """The interface by which KvHandoff finds the engine that has the KV of a split request."""

    async def address(self, leg: DecodeLeg) -> str:
        """Return the address from which to fetch the KV of a split request.

        It is that of the prefill engine's KV transfer agent. Raises UnknownPeerError if it cannot
        be found.
        """
        ...

    def forget(self, leg: DecodeLeg) -> None: ...

    async def renew(self, leg: DecodeLeg) -> str | None:
        """Ask the prefill engine to keep the KV of a split request longer.

        Returns the new ticket (the permission to fetch the KV), or None if the KV is already freed.
        """
        ...


class UnknownPeerError(Exception):
    """Raised when the address of the engine that holds the KV cannot be found."""


class KvHandoff:
    """Offers the KV of finished prefill jobs to other engines, and fetches it for decode jobs."""

    def __init__(
        self,
        owner: HandoffOwner,
        agent: AgentPort,
        directory: PeerDirectory,
        link: PacedLink,
        recompute: bool = False,
        lease_s: float = 30.0,
        connector: str = "nixl",
    ) -> None:
        """Create the KV handoff of one mock engine. A restart of the engine needs a new object.

        owner      the engine
        agent      its KV transfer agent
        directory  addresses of prefill engines' agents
        link       limits the speed of incoming KV
        recompute  what to do if KV fails to arrive. True: compute it here; False: fail the job
        lease_s    seconds for which KV is kept for another engine, here and at the sender
        connector  name of the connector in metrics, such as "nixl"
        """
        self.agent = agent
        self.stats = HandoffStats(connector)
        self._owner = owner
        self._directory = directory
        self._link = link
        self._recompute = recompute
        self._lease_s = lease_s
        self._offers: dict[Job, OfferPort] = {}
        self._landings: dict[Job, LandingPort] = {}
        self._renewal_timers: dict[Job, asyncio.TimerHandle] = {}
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running_tasks(self) -> int:
        """Return the number of running tasks: offers, incoming transfers, and notices to the
        sender.
        """
        return len(self._tasks)

    def lines(self, labels: str) -> Iterator[str]:
        """Yield the metrics of KV transfers and leases in Prometheus text format."""
        yield from self.stats.lines(labels)
        stats = self.agent.stats()
        yield "# TYPE mock:kv_leases gauge"
        for state, count in stats["leases"].items():
            yield f'mock:kv_leases{{{labels},state="{state}"}} {count}'
        yield "# TYPE mock:kv_unclaimed_seconds counter"
        yield f"mock:kv_unclaimed_seconds_total{{{labels}}} {stats['unclaimed_s']}"

    def is_sending(self, job: Job) -> bool | None:
        """Return whether an engine is fetching this job's KV; None: the KV is no longer offered."""
        if job not in self._offers:
            return None
        leases = self.agent.stats()["leases"]
        return bool(leases["claimed"] + leases["moving"])

    def is_receiving(self, job: Job) -> bool | None:
        """Return whether KV for this job is arriving; None: the job does not wait for KV."""
        if job.state is not JobState.FETCHING:
            return None
        return bool(self.agent.stats()["reservations"]["moving"])

    def revoke_offer(self, job: Job) -> None:
        """Withdraw the offer of a job's KV, as if the engine had evicted the blocks."""
        self._offers[job].revoke()

    def offer(self, job: Job) -> OfferedKv:
        """Offer the KV of a finished job's prompt to another engine, and return its description.

        The scheduler keeps the job's blocks until the offer ends.
        """
        leg = job.leg
        assert isinstance(leg, PrefillLeg)
        blocks = self._owner.scheduler.kept[job][: blocks_for(job.prompt_tokens)]
        offer = self._offers[job] = self.agent.offer(
            leg.name, blocks, job.prompt_tokens, ttl_s=leg.hold_s, public=leg.is_public
        )
        self._spawn(self._follow_offer(job, leg, offer))
        return OfferedKv(leg.name, offer.ticket, blocks, job.prompt_tokens, max(0, job.cached))

    def renew(self, name: str, ticket: str) -> str | None:
        """Extend an offer of KV so that it ends two thirds of a lease from now.

        Returns the ticket to fetch the KV, or None if the offer has ended.
        """
        offer = next(
            (o for o in self._offers.values() if o.name == name and o.ticket == ticket), None
        )
        return offer.ticket if offer is not None and offer.renew(self._lease_s * 2 / 3) else None

    def on_queued(self, job: Job) -> None:
        """Remind the prefill engine regularly to keep the KV of a decode job that is queued here.

        The job may wait so long for free blocks that the KV would otherwise be freed before.
        """
        if isinstance(job.leg, DecodeLeg) and job.leg.renew and not job.leg.is_parked:
            # Renew six times per lease, as often as vLLM sends heartbeats.
            self._renewal_timers[job] = asyncio.get_running_loop().call_later(
                self._lease_s / 6, self._on_renewal_due, job
            )

    def _on_renewal_due(self, job: Job) -> None:
        del self._renewal_timers[job]
        self._spawn(self._renew_lease(job))

    async def _renew_lease(self, job: Job) -> None:
        # Renew the lease once and schedule the next renewal, if the job is still queued.
        assert isinstance(job.leg, DecodeLeg)
        ticket = await self._directory.renew(job.leg)
        if ticket is not None and job.cached < 0 and job.state is JobState.WAITING:
            job.leg = msgspec.structs.replace(job.leg, ticket=ticket)
            self.on_queued(job)

    def _stop_renewing(self, job: Job) -> None:
        timer = self._renewal_timers.pop(job, None)
        if timer is not None:
            timer.cancel()

    def fetch(self, job: Job) -> None:
        """Start to fetch the KV of a job that the scheduler has given blocks.

        If all of the KV is already cached here, the prefill engine is only notified to free it.
        """
        leg = job.leg
        assert isinstance(leg, DecodeLeg)
        self._stop_renewing(job)
        if leg.is_parked:
            return
        if job.state is JobState.FETCHING:
            self._spawn(self._follow_landing(job, leg))
        else:
            job.cached = job.cached if leg.cached is None else leg.cached
            self.decline(leg)

    def on_aborted(self, job: Job) -> None:
        """Stop the KV transfers of an aborted job, and let the other engine free its blocks."""
        self._stop_renewing(job)
        if job in self._landings:
            self._landings[job].cancel()
        elif isinstance(job.leg, DecodeLeg) and job.cached < 0:
            # The job was never admitted, so its KV was never fetched.
            self.decline(job.leg)
        if (
            job in self._offers
            and isinstance(job.leg, PrefillLeg)
            and job.leg.answering is AnswerTime.WHEN_TAKEN
        ):
            self._offers[job].revoke()
        if isinstance(job.leg, DecodeLeg) and job.leg.is_parked:
            self._free(job)

    def decline(self, leg: DecodeLeg) -> None:
        """Inform the prefill engine that its KV is not needed, so that it frees the blocks."""
        if not leg.is_parked and not self._closed:
            self._spawn(self._decline(leg))

    def drop_all(self) -> None:
        """End all KV transfers in both directions, because this engine has died."""
        for job in list(self._renewal_timers):
            self._stop_renewing(job)
        for offer in list(self._offers.values()):
            offer.revoke()
        for landing in list(self._landings.values()):
            landing.cancel()

    async def close(self) -> None:
        """End all KV transfers, and wait until none of them accesses the engine's blocks."""
        self._closed = True
        self.drop_all()
        await self.agent.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow_offer(self, job: Job, leg: PrefillLeg, offer: OfferPort) -> None:
        try:
            outcome = await offer.wait_ended()
            self.stats.count_sent(outcome)
            if outcome.has_landed:
                await self._link.transfer(job.prompt_tokens)
        finally:
            del self._offers[job]
            self._free(job)
        if leg.answering is AnswerTime.WHEN_TAKEN:
            self._owner.on_blocks_taken(job, outcome)

    async def _follow_landing(self, job: Job, leg: DecodeLeg) -> None:
        # Fetch a job's KV, then continue the job, or free its blocks if it was aborted.
        started_s = asyncio.get_running_loop().time()
        try:
            outcome = await self._fetch_and_wait(job, leg)
            if outcome.has_landed:
                await self._link.transfer(_offered_tokens(job, leg) - job.cached)
            else:
                self._directory.forget(leg)
            self.stats.count_received(outcome, asyncio.get_running_loop().time() - started_s)
            if job.state is JobState.FETCHING:
                self._continue_job(job, leg, outcome)
        finally:
            # Free blocks that the job no longer uses: nothing writes to them now.
            self._free(job)

    def _continue_job(self, job: Job, leg: DecodeLeg, outcome: TransferOutcome) -> None:
        # Continue a job whose transfer ended; if it failed, recompute the KV or fail the job.
        if outcome.has_landed:
            self._owner.scheduler.on_landed(
                job, leg.loadable_tokens(job.prompt_tokens) if leg.cached is None else leg.cached
            )
        elif self._recompute:
            self._owner.scheduler.recompute(job)
        else:
            self._owner.fail_job(job, f"KV load failed: {outcome.reason}")

    async def _fetch_and_wait(self, job: Job, leg: DecodeLeg) -> TransferOutcome:
        # Fetch a job's KV and return the outcome.
        #
        # Afterwards nothing writes to the job's blocks.
        try:
            address = await self._directory.address(leg)
        except UnknownPeerError as error:
            return unreachable_outcome(str(error))
        if job.state is not JobState.FETCHING:
            self.decline(leg)
            return unreachable_outcome("the request was aborted before the transfer began")
        if self._closed:
            return unreachable_outcome("this engine is stopping")
        landing = self._landings[job] = self.agent.fetch(
            address,
            leg.name,
            job.blocks,
            _offered_tokens(job, leg),
            ticket=leg.ticket,
            skip_tokens=job.cached,
            timeout_s=leg.wait_s,
        )
        try:
            return await landing.wait_ended()
        finally:
            del self._landings[job]

    async def _decline(self, leg: DecodeLeg) -> None:
        try:
            address = await self._directory.address(leg)
        except UnknownPeerError:
            return
        if self._closed:
            return
        # The memory has one block more than the scheduler knows. Fetching a single token into it
        # frees the sender.
        spare_block = [self._owner.scheduler.pool.total]
        landing = self.agent.fetch(
            address, leg.name, spare_block, 1, ticket=leg.ticket, timeout_s=leg.wait_s
        )
        cancel_timer = (
            None if leg.ticket else asyncio.get_running_loop().call_later(DECLINE_S, landing.cancel)
        )
        await landing.wait_ended()
        if cancel_timer is not None:
            cancel_timer.cancel()

    def _free(self, job: Job) -> None:
        self._owner.scheduler.release_kept(job)
        self._owner.wake()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _offered_tokens(job: Job, leg: DecodeLeg) -> int:
    return job.prompt_tokens if leg.tokens is None else min(leg.tokens, job.prompt_tokens)


def unreachable_outcome(detail: str) -> TransferOutcome:
    """Return the outcome of a KV transfer that could not start, as its peer was unreachable.

    `detail` is the reason.
    """
    return outcome_for(EndReason.UNREACHABLE, detail=detail)
