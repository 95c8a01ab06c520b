"""The last gates (steps) of the sizing recipe: replicas, and split into prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator

from planner.size.plan_draft import Draft
from planner.size.replica_times import BatchTimes, at_batch, largest_batch
from planner.size.units import ms
from planner.size.workload import MAX_BATCH
from policies.sizing.replica_count import (
    ceiling_of,
    concurrency_of,
    replicas_for,
    replicas_for_wait,
    wait_quantile_s,
)

# To shorten waits, a plan has at most this multiple of the replicas that the load needs.
MOST_FOR_WAITS = 2


def count_replicas(draft: Draft) -> None:
    """Set the number of replicas of a sizing plan, the last of its eight questions (gates).

    The number follows from Little's law, and from how long requests may wait for a prefill.
    """
    numbers = [_ceiling(draft)]
    loaded = at_batch(draft.times(), draft.work, draft.ceiling)
    load = _concurrency(draft, loaded)
    draft.replicas = replicas_for(load, draft.ceiling)
    numbers.append(
        f"{load:,.1f} requests at once / {draft.ceiling} per replica = {draft.replicas} replica(s)"
    )
    numbers += _waits(draft, load / (draft.ceiling / loaded.requests_s))
    numbers += _budget(draft, loaded)
    draft.add(
        "How many replicas?",
        numbers,
        f"{draft.replicas} replica(s) of {draft.layout.gpus} GPU(s)",
        "seed 002 (L = lambda W)",
        "seeds 000 and 002 replicate first, 004 puts DP last: both add replicas once one replica "
        "keeps its promises",
    )


def _ceiling(draft: Draft) -> str:
    # Set how many requests one replica serves at once; return a text that explains it.
    work = draft.work
    rank_tokens = draft.memory().tokens // draft.layout.dp
    kv = int(rank_tokens / (1 + work.headroom)) // work.context * draft.layout.dp
    times, tpot_s = draft.times(), work.tpot_s
    is_kept = tpot_s is not None and times.decode_s(1, work.mean_context) <= tpot_s
    limit = min(kv, MAX_BATCH * draft.layout.dp)
    speed = largest_batch(times, work, limit, tpot_s if is_kept else None)
    draft.ceiling = max(1, ceiling_of(kv, speed, work.max_concurrency))
    cap = "none" if work.max_concurrency is None else work.max_concurrency
    return (
        f"one replica takes {draft.ceiling} at once: KV {kv} of {work.context:,} tokens with "
        f"{work.headroom:.0%} spare, TPOT {speed}, cap {cap}"
    )


def _concurrency(draft: Draft, loaded: BatchTimes) -> float:
    work = draft.work
    if work.concurrency is not None:
        return work.concurrency
    return concurrency_of(work.rate_s or 0.0, loaded.batch / loaded.requests_s)


def _waits(draft: Draft, rate_s: float) -> Iterator[str]:
    # Add replicas if requests would wait too long for their prefill, and yield texts that explain
    # it. MOST_FOR_WAITS limits the number of replicas.
    #
    # Pipeline stages and data-parallel ranks of a replica compute prompts at the same time.
    work, prefill_s = draft.work, at_batch(draft.times(), draft.work, 1).ttft_s
    lanes = draft.layout.pp * draft.layout.dp
    busy, service_s = rate_s * prefill_s / lanes, prefill_s / lanes
    if work.ttft_s is not None and prefill_s <= work.ttft_s:
        wait_s = work.ttft_s - prefill_s
        needed = replicas_for_wait(busy, service_s, work.percentile, wait_s)
        most = MOST_FOR_WAITS * draft.replicas
        text = f"{needed} replicas keep TTFT for {work.percentile:g} % of requests"
        if needed > most:
            draft.shortfalls.append(
                f"{text}, more than {MOST_FOR_WAITS} times the {draft.replicas} of the load: "
                "they are not bought; a smaller prefill (more TP, quantised weights) is cheaper"
            )
        elif needed > draft.replicas:
            draft.replicas = needed
            yield text
    load = busy / draft.replicas
    draft.wait_s = wait_quantile_s(load, service_s, work.percentile)
    if load < 1:
        yield (
            f"prefill takes {load:.0%} of each replica, so {work.percentile:g} % wait "
            f"{ms(draft.wait_s)} at most before {ms(prefill_s)} of prefill"
        )


def _budget(draft: Draft, loaded: BatchTimes) -> Iterator[str]:
    gpus, each = draft.hardware.gpus, draft.layout.gpus
    if gpus is None or draft.replicas * each <= gpus:
        return
    held = gpus // each
    text = f"{draft.replicas} replicas need {draft.replicas * each} GPUs, and there are {gpus}"
    draft.shortfalls.append(
        f"{text}: {held} replicas carry {held * loaded.requests_s:.1f} requests/s"
    )
    yield text


def split_phases(draft: Draft) -> None:
    """Add figures to a sizing plan by which to judge separate prefill and decode engines.

    Nothing is decided: only a replay shows whether separate engines are better.
    """
    work, single = draft.work, at_batch(draft.times(), draft.work, 1)
    loaded = at_batch(draft.times(), work, draft.ceiling)
    stall_s = loaded.tpot_s - loaded.step_s
    numbers = [
        f"prefills of others add {ms(stall_s)} to each of {ms(loaded.step_s)} per token",
        f"a prompt's KV is {draft.model.kv_token_bytes * work.prompt / 1e9:.2f} GB, "
        f"{ms(draft.model.kv_token_bytes * work.prompt / draft.hardware.gpu.nic_bytes_s)} over a "
        f"NIC, beside {ms(single.ttft_s)} of prefill",
    ]
    if draft.replicas < 2:
        answer = "no: one replica cannot be divided into two pools"
    elif stall_s < 0.1 * loaded.step_s:
        answer = "no: prefills hardly delay tokens"
    else:
        answer = "a replay decides: --from your access log compares both"
    draft.add(
        "Separate prefill and decode?", numbers, answer, "seeds 002, 004 (long prompts, TTFT, TPOT)"
    )
