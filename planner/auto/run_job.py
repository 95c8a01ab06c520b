"""Runs a gateway's job: for each pool, compare routing policies on the access log's requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from planner.auto.cpu_budget import OnProgress
from planner.auto.log_window import choose_window
from planner.auto.policy_estimation import evaluate
from planner.plan.config_to_replay import PoolCaseError, cases
from planner.plan.recent_traffic import RecentTraffic, recent
from planner.traces.trace_lines import TraceError
from policies.auto.replay_messages import PoolEstimate, PoolJob, ReplayAnswer, ReplayJob

TAIL_BYTES = 32 << 20
"""Maximum bytes of the access log that are read, counted from its end."""


def read_job(pipe: BinaryIO) -> ReplayJob | None:
    """Read one line of JSON from a pipe, and return the gateway's job; None: the pipe has ended."""
    line = pipe.readline()
    return msgspec.json.decode(line, type=ReplayJob) if line.endswith(b"\n") else None


def run_job(job: ReplayJob, on_progress: OnProgress | None = None) -> bytes:
    """Run a comparison job of the gateway, and return its result as one line of JSON."""
    estimates: list[PoolEstimate] = []
    failed: dict[str, str] = {}
    for pool in job.pools:
        try:
            estimates.append(_evaluate(job, pool, on_progress))
        except (PoolCaseError, TraceError) as error:
            failed[pool.pool] = str(error)
        except MemoryError:
            failed[pool.pool] = "the replay needs more memory than it may use"
    answer = ReplayAnswer(tuple(estimates), failed, time.process_time())
    return msgspec.json.encode(answer)


def _evaluate(job: ReplayJob, pool: PoolJob, on_progress: OnProgress | None) -> PoolEstimate:
    case = cases(job.config)[pool.pool]
    lately = recent(Path(job.log), pool.window_s, TAIL_BYTES)
    lines = [line for line in lately.lines if case.models is None or line.model in case.models]
    if not lines:
        raise TraceError(f"the access log {job.log} contains no request for this pool")
    from_s = max(pool.counts_from_s, job.now_s - pool.window_s)
    lately = RecentTraffic(lines, lately.begins_s, max(lately.from_s, from_s))
    lately = choose_window(lately, from_s, job.now_s)
    return evaluate(case, pool.members, pool.endpoints, lately, pool.in_force_since_s, on_progress)
