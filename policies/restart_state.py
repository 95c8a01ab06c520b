"""Converts what policies have learned to plain values and back, for the successor at a restart.

This module defines the values, and converts live objects to them and back. The gateway chooses
which objects to save. Slots (the numbers of endpoints) differ between processes, so a map converts
them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from itertools import islice
from math import inf, isfinite
from typing import TYPE_CHECKING

import msgspec

from policies.admission.adaptive_session_limit import ActiveSession
from policies.admission.cap_admission import SessionCap
from policies.admission.quota import QuotaLimits
from policies.engine.kalman import MOST_CORRECTION
from policies.engine.step_time import SpeedBelief, StepCosts
from policies.prefix.predicted_cache import MAX_SLOTS
from policies.sizing.workload_drift import BINS, MEASURES

if TYPE_CHECKING:
    from policies.admission.priced_admission import PricedAdmission
    from policies.admission.quota import Quota
    from policies.engine.kalman import KalmanFilter
    from policies.engine.output_length import OutputLengths
    from policies.prefix.prefix_index import PrefixIndex
    from policies.sizing.workload_drift import DriftWatch, ShapeMemory

BLOCKS = 512
"""Number of index blocks in one saved value; saving them takes about half a millisecond."""

STAMPS = 1 << 14
"""Number of stamps after which a saved value has no further block, so that it stays small."""

_SLOT = MAX_SLOTS - 1
_STAMP_BYTES = 8
_NO_MEANS = (None, None, None, None, None)


class Blocks(msgspec.Struct, frozen=True, array_like=True, tag="blocks"):
    """Some blocks of a prefix index as packed arrays, oldest first, to save them for a restart.

    A prefix index stores which endpoint has which prompt blocks cached. A stamp shows when one
    endpoint last used a block.

    keys    key of each block, unsigned 64-bit
    counts  number of stamps of each block, unsigned 16-bit
    stamps  the stamps of all blocks one after another, unsigned 64-bit
    """

    keys: bytes
    counts: bytes
    stamps: bytes


class HolderState(msgspec.Struct, frozen=True, array_like=True):
    """What a prefix index knows of one endpoint apart from its blocks, saved for a restart.

    The fields are those of predicted_cache.PredictedCache.
    """

    slot: int
    stamp: int
    oldest_alive: int
    tokens: dict[int, float]
    held: float
    trust: float
    evicted: float
    missed: float
    reborn: int


class KalmanState(msgspec.Struct, frozen=True, array_like=True):
    logs: list[float]
    covar: list[list[float]]
    var: float
    last: float


class BeliefState(msgspec.Struct, frozen=True, array_like=True):
    """The saved state of an endpoint's learned speed (SpeedBelief).

    `shape` contains the estimated step costs, which the learned factors correct. The other fields
    have the names of SpeedBelief's attributes.
    """

    shape: StepCosts
    prompts: KalmanState
    decodes: KalmanState
    layers: KalmanState
    request_s: float
    reached: float
    mix: list[float]
    context: float


class SessionState(msgspec.Struct, frozen=True, array_like=True):
    name: str | int
    tokens: int
    seen_s: float


class AdmissionState(msgspec.Struct, frozen=True, array_like=True):
    """The saved state of an admission policy that limits sessions.

    means      running means of the policy `priced`; None: another policy
    phi        WorkingSet.memory_share; inf: sessions are not limited
    memory_s   WorkingSet.memory_s, in seconds
    sessions   the active sessions, least recently used first
    full_rate  FullLoadRate.per_unit of the policy `priced`; None: another policy
    """

    means: tuple[float | None, float | None, float | None, float | None, float | None]
    phi: float
    memory_s: float
    sessions: list[SessionState]
    full_rate: float | None = None


class QuotaState(msgspec.Struct, frozen=True, array_like=True):
    """The saved state of a quota: its limits, and the level of each token bucket.

    A bucket is saved as (level, time of that level); None: it has no limit. Times are on the
    machine's monotonic clock.
    """

    limits: QuotaLimits
    requests: tuple[float, float] | None
    tokens: tuple[float, float] | None


class LengthState(msgspec.Struct, frozen=True, array_like=True):
    key: tuple[str, ...]
    answers: int
    mean: float


# Prefix index


def index_blocks(index: PrefixIndex) -> Iterator[Blocks]:
    """Yield the blocks of a prefix index in several parts, to save them for a restart.

    The index may change between two parts. Blocks that are inserted or dropped meanwhile may be
    missing.
    """
    for number in range(len(index._shards)):
        keys = iter(tuple(index._shards[number]))
        while (part := _next_blocks(index, keys, index._shards[number])).keys:
            yield part


def _next_blocks(index: PrefixIndex, keys: Iterator[int], shard: Mapping[int, int]) -> Blocks:
    # Return the next of these blocks as far as the shard, a part of the index, has them now.
    #
    # Entries that were read earlier may name tables of holders that are gone.
    saved, counts, stamps = array("Q"), array("H"), array("Q")
    for key in keys:
        block_stamps = index.stamps_of(shard.get(key, 0))
        if block_stamps:
            saved.append(key)
            counts.append(len(block_stamps))
            stamps.extend(block_stamps)
        if len(saved) >= BLOCKS or len(stamps) >= STAMPS:
            break
    return Blocks(saved.tobytes(), counts.tobytes(), stamps.tobytes())


def index_holders(index: PrefixIndex) -> list[HolderState]:
    """Return what a prefix index knows of each endpoint apart from its blocks, to save it.

    Call it after `index_blocks`, so that it covers every saved block.
    """
    return [
        HolderState(
            slot,
            holder.stamp,
            index._oldest_alive[slot],
            dict(holder.tokens),
            holder.held,
            holder.trust,
            holder.evicted,
            holder.missed,
            holder.reborn,
        )
        for slot, holder in enumerate(index._holders)
    ]


def restore_blocks(
    index: PrefixIndex, blocks: Blocks, slots: Mapping[int, int], tables: dict[bytes, int]
) -> int:
    """Add blocks that were saved before a restart to a prefix index; return how many were added.

    index   the prefix index
    blocks  the saved blocks
    slots   the present number (slot) of each endpoint, by its number when the blocks were saved.
            Blocks of other endpoints are skipped
    tables  the tables of holders that earlier calls have restored, by their saved stamps. At first,
            it is empty

    Raises ValueError if the lengths of the arrays do not match.
    """
    keys = array("Q", blocks.keys)
    counts = array("H", blocks.counts)
    stamps = array("Q", blocks.stamps)
    if len(keys) != len(counts) or sum(counts) != len(stamps):
        raise ValueError(
            f"the saved prefix index is inconsistent: {len(keys)} block keys, {len(counts)} "
            f"counts with the sum {sum(counts)}, {len(stamps)} stamps"
        )
    index._make_room(len(keys))
    known: dict[bytes, int] = {}  # neighbours share one int object, as in the original
    begin = added = 0
    for key, count in zip(keys, counts, strict=True):
        raw = stamps[begin : begin + count].tobytes()
        begin += count
        if index.has_block(key):
            continue
        holders = known.get(raw) or tables.get(raw, 0)
        if not holders or (holders < 0 and holders not in index.tables.stamps):
            holders = index.pack_or_tabulate(_remap(array("Q", raw), slots))
            (tables if holders < 0 else known)[raw] = holders
        if holders:
            index.add_block(key, holders)
            added += 1
    index._make_room(0)  # for tables
    return added


def _remap(stamps: array[int], slots: Mapping[int, int]) -> list[int]:
    return [
        _with_slot(stamp, slot)
        for stamp in stamps
        if (slot := slots.get(stamp & _SLOT)) is not None
    ]


def _with_slot(stamp: int, slot: int) -> int:
    return stamp & ~_SLOT | slot


def restore_holder(index: PrefixIndex, state: HolderState, slot: int) -> None:
    """Restore the state of one slot (endpoint) of a prefix index.

    Its capacity is not restored, because the endpoint reports it.
    """
    holder = index._holder(slot)
    holder.stamp, holder.reborn = _with_slot(state.stamp, slot), _with_slot(state.reborn, slot)
    holder.tokens = {_with_slot(stamp, slot): tokens for stamp, tokens in state.tokens.items()}
    holder.tokens.setdefault(holder.stamp, 0.0)
    holder.held, holder.trust = state.held, state.trust
    holder.evicted, holder.missed = state.evicted, state.missed
    index._oldest_alive[slot] = _with_slot(state.oldest_alive, slot)


# Speeds


def belief_state(belief: SpeedBelief) -> BeliefState:
    return BeliefState(
        belief.shape,
        _kalman_state(belief.prompts),
        _kalman_state(belief.decodes),
        _kalman_state(belief.layers),
        belief.request_s,
        belief._reached,
        list(belief._mix),
        belief._context,
    )


def restore_belief(belief: SpeedBelief, state: BeliefState) -> bool:
    """Restore an endpoint's learned speed from its saved state, and return whether it was restored.

    It is not restored if the saved estimate (`shape`) differs or if a number is invalid.

    belief  the learned speed to change
    state   the saved state
    """
    filters = (
        (belief.prompts, state.prompts),
        (belief.decodes, state.decodes),
        (belief.layers, state.layers),
    )
    if state.shape != belief.shape or len(state.mix) != len(belief._mix):
        return False
    numbers = (state.request_s, state.reached, state.context, *state.mix)
    if not all(map(isfinite, numbers)) or not all(_fits(live, saved) for live, saved in filters):
        return False
    for live, saved in filters:
        live.restore(saved.logs, saved.covar, saved.var, saved.last)
    belief.request_s, belief._reached = state.request_s, state.reached
    belief._mix, belief._context = list(state.mix), state.context
    belief.apply_factors()
    return True


def copy_belief(belief: SpeedBelief) -> SpeedBelief:
    """Return an independent copy of an endpoint's learned speed.

    If a number in the learned speed is not finite, the copy is as before any observation.
    """
    own = SpeedBelief(belief.shape)
    restore_belief(own, belief_state(belief))
    return own


def _kalman_state(live: KalmanFilter) -> KalmanState:
    return KalmanState(list(live._logs), [list(row) for row in live.covar], live.var, live._last)


def _fits(live: KalmanFilter, state: KalmanState) -> bool:
    size = len(live._logs)
    numbers = [*state.logs, state.var, state.last, *(value for row in state.covar for value in row)]
    return (
        len(state.logs) == len(state.covar) == size
        and all(len(row) == size for row in state.covar)
        and all(map(isfinite, numbers))
        and all(abs(value) <= MOST_CORRECTION for value in state.logs)
    )


# Admission, quotas, lengths of answers


def admission_state(live: PricedAdmission | SessionCap) -> AdmissionState:
    """Return what an admission policy has learned about sessions, as plain values to be saved."""
    sessions = live.sessions
    rows = [
        SessionState(name, session.tokens, session.last_used_s)
        for name, session in sessions._active.items()
    ]
    if isinstance(live, SessionCap):
        return AdmissionState(_NO_MEANS, sessions.memory_share, sessions.memory_s, rows)
    means = (live._budget, live._tpot_budget, live._typical_s, live._per_weight, None)
    rate = live._full_rate.per_unit
    return AdmissionState(means, sessions.memory_share, sessions.memory_s, rows, rate)


def restore_admission(live: PricedAdmission | SessionCap, state: AdmissionState) -> None:
    """Set an admission policy to what `admission_state` returned before a restart.

    The state may come from another kind of admission policy, if both kinds limit sessions.
    """
    if not isinstance(live, SessionCap) and state.means != _NO_MEANS:
        live._budget, live._tpot_budget, live._typical_s, live._per_weight, _ = state.means
        live._full_rate.per_unit = state.full_rate
    sessions, gate = live.sessions, live.sessions.gate
    if state.phi < inf:
        # While a limit that depends on evidence ends, it may be above `most`.
        most = gate.most if gate.start is not None else inf
        sessions.memory_share = min(most, max(gate.least, state.phi))
    sessions.memory_s = min(gate.longest_s, max(gate.shortest_s, state.memory_s))
    for row in state.sessions:
        if row.name not in sessions._active:
            session = sessions._active[row.name] = ActiveSession(row.seen_s)
            sessions._resize(session, max(0, row.tokens))
    if state.sessions and (sessions.is_limited or not isinstance(live, SessionCap)):
        live.is_calm = False


def quota_state(live: Quota) -> QuotaState:
    requests, tokens = live._requests, live._tokens
    return QuotaState(
        live.limits,
        None if requests is None else (requests._level, requests._at),
        None if tokens is None else (tokens._level, tokens._at),
    )


def restore_quota(live: Quota, state: QuotaState) -> bool:
    """Set the levels of a tenant's quota to those saved before a restart.

    Returns whether they were set: they are not if the quota's limits have changed.
    """
    if state.limits != live.limits:
        return False
    for bucket, saved in ((live._requests, state.requests), (live._tokens, state.tokens)):
        if bucket is not None and saved is not None:
            bucket._level, bucket._at = min(float(bucket.limit), saved[0]), saved[1]
    return True


def length_states(live: OutputLengths) -> list[LengthState]:
    return [LengthState(key, answers, mean) for key, (answers, mean) in live._means.items()]


def restore_lengths(live: OutputLengths, states: list[LengthState]) -> None:
    for state in states[-live._most :]:
        live._means[state.key] = state.answers, state.mean


# Drift of the workload


class DriftState(msgspec.Struct, frozen=True, array_like=True, tag="drift"):
    """What a drift watch, which detects changes of the traffic, has saved for a restart.

    sized_for       shares by measure with which the window is compared
    counts          requests of the unfinished window, by measure and bin
    requests        number of requests in this window
    begins_s        beginning of the window
    ends_s          its planned end
    began_s         when the detection began
    usual_requests  number of requests expected so far in the window, from the usual hourly rates
    above           by measure, the number of consecutive windows above the limit
    """

    pool: str
    sized_for: dict[str, list[float]]
    counts: dict[str, list[int]]
    requests: int
    begins_s: float
    ends_s: float
    began_s: float
    usual_requests: float
    above: dict[str, int]


class SessionTurns(msgspec.Struct, frozen=True, array_like=True, tag="turns"):
    """Some sessions that drift detection has seen, as (session, number of requests), oldest
    first.
    """

    turns: list[tuple[int, int]]


def drift_state(pool: str, live: DriftWatch) -> DriftState:
    return DriftState(
        pool,
        {name: list(shares) for name, shares in live._sized_for.items()},
        {name: list(counts) for name, counts in live._window.counts.items()},
        live._window.requests,
        live._begins_s,
        live._ends_s,
        live._began_s,
        live._usual_requests,
        dict(live._above),
    )


def restore_drift(live: DriftWatch, state: DriftState) -> bool:
    """Continue the unfinished window of a drift watch after a restart.

    Returns False, and changes nothing, if the watch now compares with other shares or has other
    bins. Prompt blocks are not saved, so the share of uncached prompts is compared only after some
    time.
    """
    own = {name: list(shares) for name, shares in live._sized_for.items()}
    sizes = {name: len(counts) for name, counts in state.counts.items()}
    if own != state.sized_for or sizes != dict(BINS) or state.above.keys() != set(MEASURES):
        return False
    live._window.requests, live._window.counts = state.requests, dict(state.counts)
    live._begins_s, live._ends_s = state.begins_s, state.ends_s
    live._usual_requests, live._above = state.usual_requests, dict(state.above)
    live._warm_from_s |= {"turns": state.began_s}
    return True


def session_turns(live: ShapeMemory) -> Iterator[SessionTurns]:
    """Yield the sessions that a drift watch has counted, in several parts, to save them."""
    rows = iter([(key, turns) for key, turns in live._turns.items() if isinstance(key, int)])
    while part := list(islice(rows, BLOCKS)):
        yield SessionTurns(part)


def restore_turns(live: ShapeMemory, state: SessionTurns) -> None:
    live._turns.update(state.turns)
    while len(live._turns) > live._most_sessions:
        del live._turns[next(iter(live._turns))]
