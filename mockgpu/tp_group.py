"""TpGroup: one running mock engine (a tensor-parallel group), which computes the jobs it gets.

A caller submits jobs, each with a sink, an object that receives the job's tokens. All methods run
on the event loop without awaiting. HTTP is in mockgpu/http, the content of a step in scheduler.py,
and its duration in timing/roofline.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvtransfer.protocol.outcomes import TransferOutcome
from mockgpu.fault_grammar import InjectedFault
from mockgpu.handoff.kv_handoff import KvHandoff
from mockgpu.job_faults import KillFaults
from mockgpu.kv_events.numbered_event_batches import KvEventSpec
from mockgpu.kv_options import StoreSpec, TransferSpec
from mockgpu.metrics import GroupMetrics
from mockgpu.paged_kv_cache import BLOCK_TOKENS, BlockPool
from mockgpu.rank_lockstep import StepTimer
from mockgpu.request_parser import ApiError
from mockgpu.scheduler import Job, JobState, PrefillChunk, Scheduler, StepPlan
from mockgpu.split_legs import AnswerTime, DecodeLeg, PrefillLeg
from mockgpu.timing.layout_times import (
    LockstepTimes,
    SlowestRank,
    shared_experts_for,
    step_times_for,
)
from mockgpu.timing.ranked_engine import RankedEngine
from mockgpu.timing.roofline import PROFILES, Profile
from policies.sizing.gpu_memory import Demand, check_memory
from policies.sizing.gpus import Gpu
from policies.sizing.model_shapes import Llm

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.kv_bytes import KvMemory
    from mockgpu.kv_events.zmq_publisher import KvPublisher
    from mockgpu.kv_store import StoreTier


class GroupSpec(RankedEngine, msgspec.Struct, frozen=True):
    """The parameters of one mock engine (TP group).

    kv_tokens         size of the KV cache in tokens; None: as many as the GPU memory holds
    speed             factor by which simulated time is faster than real time; inf: no waiting
    stores_responses  whether to store responses for later requests (Responses API)
    transfer          options of KV transfer in split requests; None: whole requests only
    lacks             names of APIs that this engine does not serve, unlike the imitated one
    may_end_from      token limit from which on an answer may end before its limit; None: every
                      answer reaches its limit
    answer_noise      fraction (0 to 1) of prompts to which it answers differently from other
                      engines
    kv_events         how it publishes KV events; None: it publishes none
    pp                number of pipeline stages
    ep                number of expert-parallel ranks
    dp                number of data-parallel ranks within the engine
    cp                number of context-parallel ranks
    ep_skew           load of the busiest expert rank divided by the mean load, at least 1
    ranks             number of data-parallel ranks that requests can address, each with its own
                      scheduler and KV
    lockstep          whether the steps of these ranks begin and end together; None: yes if they
                      share their experts
    kv_store          how it uses its host's store of KV blocks; None: it uses none
    generation_log    path of the file that gets a line for each sequence (generation_log.py); None:
                      no file
    """

    served_name: str
    model: Llm
    gpu: Gpu
    tp: int = 1
    role: str = "both"
    profile: Profile = PROFILES["2026"]
    speed: float = 1.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_tokens: int | None = None
    max_queued: int | None = None
    cached_details: bool = True
    transfer: TransferSpec | None = None
    stores_responses: bool = False
    lacks: tuple[str, ...] = ()
    may_end_from: int | None = None
    answer_noise: float = 0.0
    kv_events: KvEventSpec | None = None
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    ep_skew: float = 1.0
    ranks: int = 1
    lockstep: bool | None = None
    kv_store: StoreSpec | None = None
    generation_log: str | None = None

    def times(self) -> LockstepTimes:
        """Return the object that computes step durations, of one rank or of several together."""
        options = (self.profile, self.max_num_batched_tokens, self.ep_skew)
        if self.shares_experts and self.is_lockstep:
            return shared_experts_for(self.model, self.gpu, self.layout, *options)
        alone = msgspec.structs.replace(self.layout, dp=self.dp)
        return SlowestRank(step_times_for(self.model, self.gpu, alone, *options))

    @property
    def capacity_tokens(self) -> int:
        """Return the number of tokens that fit into the KV cache of the engine, or of each rank.

        Each rank counts separately if requests can address ranks. Raises ValueError if the weights
        do not fit.
        """
        tokens = self.kv_tokens
        if tokens is None:
            tokens = check_memory(self.model, self.gpu, self.layout, Demand(1)).tokens
            if self.shares_experts:
                tokens //= self.ranks
        if tokens < BLOCK_TOKENS:
            raise ValueError(
                f"the model {self.model.name} does not fit on {self.layout.gpus} x "
                f"{self.gpu.name}: no memory is left for the KV cache"
            )
        return tokens

    @property
    def context(self) -> int:
        """Return the maximum number of tokens of a prompt and its answer together."""
        return min(self.model.max_context, self.capacity_tokens // BLOCK_TOKENS * BLOCK_TOKENS)


class TokenSink(Protocol):
    """The interface that receives the generated tokens of one job.

    The engine calls its methods within a step, so they must not block.
    """

    def on_token(self) -> None: ...

    def on_end(self) -> None:
        """Handle the end of a job (one sequence). It is called after the last token."""
        ...

    def on_failure(self, error: ApiError) -> None:
        """Handle the failure of a job (one sequence). No more tokens follow."""
        ...


@dataclass(slots=True)
class _Live:
    sink: TokenSink
    arrived: float
    reason: str
    started: float | None = None
    entering: asyncio.TimerHandle | None = None


class TpGroup:
    """One running mock engine: its scheduler, the health of its ranks (GPUs), and its step timer.

    Each addressable data-parallel rank has a TpGroup of its own. Ranks in lockstep share one timer,
    and a fault of one stops all of them. `memory` and `kv_handoff` are set if the engine transfers
    KV, and `kv_events` if it publishes KV events.
    """

    def __init__(
        self,
        spec: GroupSpec,
        loop: asyncio.AbstractEventLoop,
        rank: int = 0,
        lockstep: list[TpGroup] | None = None,
    ) -> None:
        # lockstep  earlier ranks whose steps begin and end together with this one's
        self.spec = spec
        self.scheduler = Scheduler(
            BlockPool(spec.capacity_tokens // BLOCK_TOKENS),
            spec.max_num_seqs,
            spec.max_num_batched_tokens * spec.pp * spec.dp,
        )
        self.metrics = GroupMetrics(spec.served_name, rank)
        self.slow_prefill = self.slow_decode = 1.0
        self.is_hanging = False
        self._ranks_up = [True] * spec.layout.gpus
        self._loop = loop
        self._live: dict[Job, _Live] = {}
        self._joined = [] if lockstep is None else lockstep
        self._timer: StepTimer = (
            self._joined[0]._timer if self._joined else StepTimer(loop, spec.times(), spec.speed)
        )
        self._joined.append(self)
        self._timer.join(self)
        self.memory: KvMemory | None = None
        self.kv_handoff: KvHandoff | None = None
        self.kv_events: KvPublisher | None = None
        self.kv_store: StoreTier | None = None
        self._kill_faults: KillFaults | None = None
        # Callback when the ranks are lost (False) and when they are back (True).
        self.on_change: Callable[[bool], None] | None = None
        # Prefill requests that are computed, but answered only once their KV has been fetched.
        self._awaiting_fetch: dict[Job, _Live] = {}

    def attach(self, memory: KvMemory) -> None:
        self.memory = memory
        self.scheduler.on_filled = self._write_filled
        self.scheduler.pool.record_allocations()

    @property
    def is_dead(self) -> bool:
        """Return whether the engine has stopped, because a GPU is lost.

        One lost GPU stops the engine, because every layer needs all of them.
        """
        return not all(self._ranks_up)

    @property
    def reads_tokens(self) -> bool:
        """Return whether each job must have its tokens, for KV events or a KV store."""
        return self.kv_events is not None or self.kv_store is not None

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def submit(self, job: Job, sink: TokenSink, reason: str) -> None:
        """Submit a job. Its tokens go to `sink`; at its end, its finish reason is `reason`.

        Raises ApiError 500 if the engine is dead, and 503 if its queue is full.
        """
        has_no_handoff = job.leg is not None and self.kv_handoff is None
        if has_no_handoff or (self.is_dead and not self.is_hanging):
            raise _engine_dead()
        if self.spec.max_queued is not None and self.queued >= self.spec.max_queued:
            self.metrics.rejections += 1
            if isinstance(job.leg, DecodeLeg) and self.kv_handoff is not None:
                self.kv_handoff.decline(job.leg)
            raise ApiError(
                503, f"The server's queue is full ({self.spec.max_queued} requests waiting)."
            )
        live = self._live[job] = _Live(sink, self._loop.time(), reason)
        job.restores = self.kv_store is not None and not isinstance(job.leg, DecodeLeg)
        if self.kv_handoff is not None:
            self.kv_handoff.on_queued(job)
        delay_s = self.spec.profile.request_s / self.spec.speed
        if delay_s > 0:
            live.entering = self._loop.call_later(delay_s, self._enter, job)
        else:
            self._enter(job)

    def mark_fault(self, job: Job, fault: InjectedFault) -> None:
        """Mark a job whose KV this fault will damage, or during which it will stop the engine."""
        if self._kill_faults is None:
            self._kill_faults = KillFaults(self, self._loop)
        self._kill_faults.mark(job, fault)

    def abort(self, job: Job) -> None:
        """Remove a job whose client has disconnected, and free its KV.

        Does nothing if the job has ended.
        """
        live = self._live.pop(job, None) or self._awaiting_fetch.pop(job, None)
        if self._kill_faults is not None:
            self._kill_faults.forget(job)
        if live is None:
            return
        if live.entering is not None:
            live.entering.cancel()
        else:
            self.scheduler.abort(job)
        self.metrics.finished["abort"] += 1
        if self.kv_handoff is not None:
            self.kv_handoff.on_aborted(job)
        # The next job may be waiting for the blocks of this one.
        self.wake()

    def fail_rank(self, rank: int, hang: bool = False) -> None:
        """Simulate the loss of a GPU: all jobs fail, or with `hang` stop without an error.

        Data-parallel ranks in lockstep fail together, because each waits for the others.
        """
        for group in self._joined:
            group._fail(rank, hang)

    def _fail(self, rank: int, hang: bool) -> None:
        if hang and self.is_dead and not self.is_hanging:  # a dead group cannot hang
            return
        self._ranks_up[rank % len(self._ranks_up)] = False
        self.is_hanging = hang
        self._timer.stop()
        if hang:
            return
        self._timer.drop_step()
        self.scheduler.pool.clear_prefix_cache()
        if self.kv_events is not None:
            self.kv_events.restart()
        for job, live in [*self._live.items(), *self._awaiting_fetch.items()]:
            self._drop(job, live)
            live.sink.on_failure(_engine_dead())
        if self.on_change is not None:
            self.on_change(False)

    def restore(self) -> None:
        """Restore all lost ranks (GPUs) of the engine, as after a restart.

        A hung engine continues with its interrupted step.
        """
        for group in self._joined:
            group._restart_ranks()
        self._timer.resume()

    def _restart_ranks(self) -> None:
        self._ranks_up = [True] * self.spec.layout.gpus
        if self.on_change is not None and not self.is_hanging:
            self.on_change(True)
        self.is_hanging = False

    def close(self) -> None:
        self._timer.stop()
        for job, live in [*self._live.items(), *self._awaiting_fetch.items()]:
            self._drop(job, live)

    def fail_job(self, job: Job, reason: str) -> None:
        """Fail a job (one sequence) whose KV is lost.

        vLLM does the same with `kv_load_failure_policy=fail`.
        """
        live = self._live.get(job)
        if live is not None:
            self._drop(job, live)
            live.sink.on_failure(ApiError(500, reason))

    def on_blocks_taken(self, job: Job, end: TransferOutcome) -> None:
        """End a prefill job whose response had to wait until its KV was fetched.

        If the transfer failed, the job fails.
        """
        live = self._awaiting_fetch.pop(job, None)
        if live is None:
            return
        self.metrics.finished[live.reason if end.has_landed else "error"] += 1
        if end.has_landed:
            live.sink.on_end()
        else:
            live.sink.on_failure(ApiError(500, f"KV transfer failed: {end.reason}"))

    @property
    def queued(self) -> int:
        """Return the number of requests that wait in the API server or the scheduler."""
        return self.scheduler.queued + sum(
            live.entering is not None for live in self._live.values()
        )

    def _drop(self, job: Job, live: _Live) -> None:
        self._live.pop(job, None)
        self._awaiting_fetch.pop(job, None)
        if live.entering is not None:
            live.entering.cancel()
        else:
            self.scheduler.abort(job)
        self.metrics.finished["error"] += 1

    def _enter(self, job: Job) -> None:
        self._live[job].entering = None
        self.scheduler.add(job)
        self.wake()

    def wake(self) -> None:
        """Start to compute engine steps if the engine is idle, because a job has arrived."""
        self._timer.wake()

    def plan_step(self) -> StepPlan | None:
        """Return the work of the next step; None if there is nothing to compute."""
        plan = self.scheduler.step()
        if self.memory is not None:
            self._prepare(self.memory, plan)
        if plan is None:
            return None
        now = self._loop.time()
        for chunk in plan.chunks:
            live = self._live[chunk.job]
            if live.started is None:
                live.started = now
                self.metrics.queue_s.observe(now - live.arrived)
        return plan

    def on_step_timed(self, plan: StepPlan, step_s: float) -> None:
        """Inform faults that occur within a step of the duration of the step that begins now."""
        if self._kill_faults is not None:
            self._kill_faults.on_step_planned(plan, step_s)

    def finish_step(self, plan: StepPlan, step_s: float) -> None:
        """Deliver the tokens of a step that has just ended after `step_s` seconds."""
        decoding = list(self.scheduler.decoding)
        if self.memory is not None:
            self._read_back(self.memory, plan.chunks)
        outcome = self.scheduler.finish(plan)
        if self.kv_store is not None:
            self.kv_store.on_step(plan, step_s)
            for job in outcome.ended:
                self.kv_store.save(job)
        if self.kv_events is not None:
            self.kv_events.flush()
        now, live = self._loop.time(), self._live
        self.metrics.steps += 1
        self.metrics.itl_s.observe(step_s, len(decoding))
        for job in outcome.first_token_jobs:
            if job.generated_count == 1:
                self.metrics.ttft_s.observe(now - live[job].arrived)
            live[job].sink.on_token()
        for job in decoding:
            live[job].sink.on_token()
        for job in outcome.ended:
            ended_live = live.pop(job)
            self.metrics.e2e_s.observe(now - ended_live.arrived)
            if job.keeps_blocks and self._hand_over(job, ended_live):
                continue
            self.metrics.finished[ended_live.reason] += 1
            ended_live.sink.on_end()
        if self._kill_faults is not None:
            self._kill_faults.on_step_done()

    def _hand_over(self, job: Job, live: _Live) -> bool:
        # Offer the KV of an ended job to other groups.
        #
        # Return True if its response has to wait until the KV has been fetched.
        assert isinstance(job.leg, PrefillLeg)
        try:
            if self.kv_handoff is None:
                raise ValueError(
                    "the engine has no KV transfer agent yet, so it cannot offer the KV of a prompt"
                )
            job.offered = self.kv_handoff.offer(job)
        except ValueError as error:
            # The name is already offered, or the engine has only just restarted.
            self.scheduler.release_kept(job)
            self.metrics.finished["error"] += 1
            live.sink.on_failure(ApiError(500, f"KV cannot be offered: {error}"))
            return True
        if self._kill_faults is not None:
            self._kill_faults.on_transfer(job, self.kv_handoff.is_sending)
            if self._kill_faults.loses_offer(job):
                self.kv_handoff.revoke_offer(job)
        if job.leg.answering is AnswerTime.WHEN_TAKEN:
            self._awaiting_fetch[job] = live
            return True
        return False

    def _prepare(self, memory: KvMemory, plan: StepPlan | None) -> None:
        # Prepare the KV memory for a step.
        #
        # Update the generations of newly allocated blocks, write bytes, and start fetching KV.
        memory.bump(self.scheduler.pool.pop_allocated())
        for chunk in plan.chunks if plan is not None else ():
            job = chunk.job
            if job.content is not None:
                memory.write(
                    job.blocks,
                    chunk.start,
                    job.content.states(chunk.start, chunk.start + chunk.tokens),
                )
        for job in self.scheduler.to_fetch():
            if self.kv_store is not None and job.restores:
                self.kv_store.fetch(job, plan.chunks if plan is not None else ())
                continue
            if self.kv_handoff is None:
                # The engine has only just restarted. A job whose KV is all cached here is in the
                # step and goes on.
                if job.state is JobState.FETCHING:
                    self.fail_job(job, "KV load failed: the engine has no agent yet")
                    self.scheduler.release_kept(job)
                continue
            self.kv_handoff.fetch(job)
            if self._kill_faults is not None:
                self._kill_faults.on_transfer(job, self.kv_handoff.is_receiving)

    def _read_back(self, memory: KvMemory, chunks: Iterable[PrefillChunk]) -> None:
        # Verify the stored KV of prompts that have just been computed.
        #
        # The first generated token depends on the bytes that are really in memory.
        for chunk in chunks:
            job = chunk.job
            if (
                chunk.is_last
                and job.state is JobState.PREFILL
                and not job.generated_count
                and job.content is not None
            ):
                taint = memory.taint(job.blocks, job.content.states(0, job.prompt_tokens))
                if taint:
                    self.metrics.tainted += 1
                    job.content.replace_text(taint)
                if self._kill_faults is not None:
                    self._kill_faults.on_prompt_computed(job)

    def _write_filled(self, job: Job, index: int) -> None:
        if self.memory is not None and job.content is not None:
            size = self.scheduler.pool.block_tokens
            start, end = max(job.prompt_tokens, index * size), (index + 1) * size
            self.memory.write(job.blocks, start, job.content.states(start, end))


def _engine_dead() -> ApiError:
    return ApiError(
        500, "EngineCore encountered an issue. See stack trace (above) for the root cause."
    )
