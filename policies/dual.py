"""Priced admission: nothing is refused while the queue is short; beyond, what is worth least for its work goes first.

The price is the dual variable of the pool's capacity (routing.md 4.8): an exponential of how far the expected queue is
beyond a share of the TTFT budget. The queue itself integrates what comes too much, so the price needs no memory of its
own, does not oscillate, and is zero when calm. Lives here: the verdicts and their numbers. Not here: the order of those
who wait (waiting.py), sessions (sessions.py), the times told to those refused (returns.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import expm1, inf, pow

from policies.admission import (
    ADMIT,
    Admission,
    AdmissionPreset,
    Outcome,
    RoomView,
    Shed,
    Verdict,
    Wait,
    no_capacity,
    past_deadline,
)
from policies.appraisal import Appraisal, appraise, left_s
from policies.bounds import Amount, Exponent, Positive, Share
from policies.latency import prefill_s
from policies.model import STANDARD, Ask, Candidate, Pick, Request
from policies.pacing import Pace
from policies.returns import Calendar, ReturnTimes, identity
from policies.sessions import SessionGate, WorkingSet, continuing, fleet_kv_tokens
from policies.usage import Usage

LEARN = 0.02
"""Weight of one request in running means."""

PASSING = 4.0
"""So many times its burst may all endpoints together be ahead of their pace while no more is asked for than they can
do: that passes by itself."""

TIGHTER = 10.0
"""So many times tighter than the typical budget one request's own may count: its client names it, and one that nobody
could keep must not set a price for all others."""


class Priced(AdmissionPreset, frozen=True):
    """In overload those enter who are worth more than their work costs others; in calm everybody.

    queue_share    share of the TTFT budget that the mean queue may take before a price is asked, in overload: when work
    overload       is asked for at this share of what the endpoints can do or more
    burst_share    the same up to full load: when work is asked for
    full_load      at this share or less
    doubt          ... less so many standard deviations of what few requests add up to by chance: some long prompts at
                   once are no overload yet
    steepness      how fast the price grows with the queue beyond that
    bend           a request pays for its work, in relation to the typical one's, to this power, 0 to 1: below 1 long
                   prompts keep more of their chance, at 0 all pay alike
    hold_share     requests leave the room while some candidate's queue is below this share of the TTFT budget,
    hold_least_s   or below this; beyond, they wait here, where a better place can still be chosen
    step_share     ... and while prefill takes of its time what leaves answers within this share of the TPOT budget,
    burst_s        give or take so many seconds of prefill
    modest, immodest  where tenants compete, factors on both: of one that asks for more than its share immodest, of one
                   that does not, more by modest
    kv_share       share of the fleet's KV that may be booked before a price is asked
    late_value     what a request is worth whose first token is expected too late, in relation to one in time
    session_value  what a request is worth that goes on with a conversation, in relation to one that begins
    weights        shares of tenants in relation to others; 1 for those not named
    """

    queue_share: Positive = 0.3
    overload: Positive = 1.3
    burst_share: Positive = 0.8
    full_load: Positive = 1.1
    doubt: Amount = 1.5
    steepness: Exponent = 4.0
    bend: Share = 0.8
    hold_share: Amount = 0.2
    hold_least_s: Amount = 0.6
    step_share: Positive = 0.85
    burst_s: Positive = 1.5
    modest: Positive = 3.0
    immodest: Positive = 0.3
    kv_share: Positive = 1.0
    late_value: Amount = 0.2
    session_value: Positive = 20.0
    weights: Mapping[str, Positive] = {}
    sessions: SessionGate = SessionGate()
    returns: ReturnTimes = ReturnTimes()

    def __post_init__(self) -> None:
        if not self.full_load < self.overload:
            raise ValueError(f"overload is more than full_load, and {self.overload} is not above {self.full_load}")

    def build(self) -> Admission:
        return PricedAdmission(self)


class PricedAdmission:
    """One pool's price and what it remembers. Pure; one owner.

    calm   nobody has to be judged: no queue, no sessions, no promises
    price  in typical requests: at 1, half of them are refused
    """

    __slots__ = (
        *(
            "_ahead_s",
            "_budget",
            "_calendar",
            "_kv_booked",
            "_overload",
            "_pace",
            "_paced",
            "_per_weight",
            "_rule",
            "_sessions",
            "_tpot_budget",
            "_typical_s",
            "_usage",
            "_work_s",
        ),
        *("calm", "name", "price", "reads_beliefs"),
    )

    def __init__(self, rule: Priced) -> None:
        self.name = "priced"
        self.calm = self.reads_beliefs = True
        self.price = 0.0
        self._rule = rule
        self._sessions = WorkingSet(rule.sessions)
        self._calendar = Calendar(rule.returns)
        self._paced, self._kv_booked = 1.0, 0.0
        self._overload = self._ahead_s = 0.0
        self._pace = Pace(rule.step_share)
        self._usage = Usage(rule.weights)
        self._budget: float | None = None
        self._tpot_budget: float | None = None
        self._typical_s: float | None = None
        self._per_weight: float | None = None
        self._work_s: float | None = None

    @property
    def sessions(self) -> WorkingSet:
        """Those whose contexts fill the fleet's KV."""
        return self._sessions

    # Verdicts

    def judge(self, ask: Ask, candidates: Sequence[Candidate], room: RoomView) -> Verdict:
        if room.capacity <= 0:
            return no_capacity()
        look = appraise(ask, candidates)
        if not look.count:
            return no_capacity()
        self._reprice(look, room)
        key = identity(ask) if room.at_door and len(self._calendar) else None
        early_s = self._calendar.early(key, ask.now) if self.price else None
        if early_s is not None:
            return Shed("early", early_s, f"This request was told to come back, which is due in {early_s:.1f} s.")
        promised = self._calendar.due(key, ask.now)  # its share of the work was set aside: it need not wait again
        shed = self._refusal(ask, candidates, look, room, promised) if room.at_door else self._too_late(ask, look, room)
        if shed is not None:
            self._usage.offered(ask.request.tenant, look.work_s, admitted=False)
            return shed
        if promised or not self.price:
            self._calendar.kept(key)
        turn = promised or not room.at_door or room.first(ask.request.tenant)
        if turn and room.busy < room.capacity and (promised or self._fluid(ask, candidates, look.count)):
            return ADMIT
        return Wait(room.limits.timeout_s)

    def _refusal(
        self, ask: Ask, candidates: Sequence[Candidate], look: Appraisal, room: RoomView, promised: bool
    ) -> Shed | None:
        """Why a newcomer may not even wait; None if it may."""
        request = ask.request
        wait_s = self._wait_s(request.tenant, look, room)
        first_s = look.ttft_s + wait_s
        patient_s = inf if request.deadline_s is None else request.deadline_s - ask.now
        if first_s > patient_s:
            return past_deadline(room, first_s, patient_s, self._come_back(ask, look, room, first_s - patient_s))
        kv_tokens = fleet_kv_tokens(candidates) if request.session else None
        if not self._sessions.admits(request.session, request.prompt_tokens + request.output_tokens, kv_tokens):
            return self._no_memory(ask, kv_tokens or 0.0)
        self._learn(ask, look)
        if promised or not self.price:
            return None
        asked = self._asked(ask, look, first_s)
        if ask.rng.random() * (1.0 + asked) < 1.0:
            return None
        return self._too_dear(ask, look, room, asked)

    def _asked(self, ask: Ask, look: Appraisal, first_s: float) -> float:
        """The price of the request's work over its value: one in 1 + that is let in."""
        request, rule = ask.request, self._rule
        weight = request.slo.weight
        worth = 2.0**request.priority * weight * (self._per_weight or 1.0 / weight)
        if first_s > left_s(ask):
            worth *= rule.late_value
        if self._sessions.holds(request.session) or continuing(request.prompt_tokens, look.cached_tokens):
            worth *= rule.session_value
        work = pow(look.work_s / max(1e-9, self._typical_s or look.work_s), rule.bend)
        return self.price * self._usage.excess(request.tenant) * work / max(1e-9, worth)

    def _too_dear(self, ask: Ask, look: Appraisal, room: RoomView, asked: float) -> Shed:
        queue_s, threshold_s = look.queue_s + self._room_s(look, room), self._threshold_s()
        back_s = self._come_back(ask, look, room, queue_s - threshold_s)
        told = (
            f"The fleet is overloaded: {queue_s:.1f} s of prompts are queued for each of {look.count} endpoints, and "
            f"beyond {threshold_s:.1f} s a price is asked. This request takes {look.work_s:.2f} s of "
            f"work; of those like it one in {1.0 + asked:.1f} is let in."
        )
        return Shed("price", back_s, told)

    def _too_late(self, ask: Ask, look: Appraisal, room: RoomView) -> Shed | None:
        """Why one who has waited is refused after all: it would miss its promise, and others would not."""
        due_s = left_s(ask)
        if not self.price or look.ttft_s <= due_s or look.prefill_s > ask.request.slo.ttft_s:
            return None
        told = f"The first token was due in {max(0.0, due_s):.1f} s and is expected in {look.ttft_s:.1f} s"
        back_s = self._come_back(ask, look, room, look.ttft_s - due_s)
        return Shed("ttft", back_s, f"{told}. {room.busy} of {room.capacity} places are taken.")

    def _no_memory(self, ask: Ask, kv_tokens: float) -> Shed:
        inside = self._sessions
        told = (
            f"The {len(inside)} sessions under way hold {inside.tokens} tokens of context, and new ones enter below "
            f"{inside.phi * kv_tokens:.0f}, {inside.phi:.0%} of the fleet's KV cache."
        )
        back_s = inside.room_in_s(ask.request.prompt_tokens, kv_tokens, ask.now)
        return Shed("session_memory", None if back_s is None else back_s * (0.75 + 0.5 * ask.rng.random()), told)

    # The price

    def _reprice(self, look: Appraisal, room: RoomView) -> None:
        """The price of this moment: flat at first, so that a burst costs few, then exponential."""
        rule = self._rule
        asked = self._usage.asked_s(room.waiting_s, rule.doubt) / (look.count * self._paced)
        self._overload = min(1.0, max(0.0, (asked - rule.full_load) / (rule.overload - rule.full_load)))
        queued = (look.queue_s + self._room_s(look, room)) / self._threshold_s()
        beyond = rule.steepness * min(4.0, max(0.0, queued - 1.0, self._kv_booked / rule.kv_share - 1.0))
        self.price = expm1(beyond) - beyond

    def _room_s(self, look: Appraisal, room: RoomView) -> float:
        """How long the endpoints take for the prompts in the room, at the pace at which they are given any."""
        return room.waiting_s / (look.count * self._paced)

    def _threshold_s(self) -> float:
        """The mean queue that costs nothing yet. A burst may fill much of the TTFT budget, for it passes by itself; a
        queue that stays because more is asked for than the endpoints can do must be short."""
        rule, budget_s = self._rule, 1.0 / self._budget if self._budget else STANDARD.ttft_s
        return budget_s * (rule.burst_share + (rule.queue_share - rule.burst_share) * self._overload)

    def _fluid(self, ask: Ask, candidates: Sequence[Candidate], count: int) -> bool:
        """Whether some candidate would begin with it soon without making others' answers slow.

        The policy may pick another than that one, so what all together are ahead of their pace is bounded too. A tenant
        that asks for no more than its share need not wait as others do: those who ask for more keep the pace.
        """
        slo, rule = ask.request.slo, self._rule
        modest = 1.0
        if self._usage.shared:
            modest = rule.immodest + rule.modest * (1.0 - self._usage.excess(ask.request.tenant))
        bursts = modest * (PASSING - (PASSING - 1.0) * self._overload)
        if self._ahead_s > bursts * rule.burst_s * count:
            return False
        until = ask.now + modest * max(rule.hold_least_s, rule.hold_share * slo.ttft_s)
        for candidate in candidates:
            load = candidate.load
            if (
                load.available
                and load.ready_at <= until
                and self._pace.ahead_s(load, slo.tpot_s, ask.now) <= modest * rule.burst_s
            ):
                return True
        return False

    def _wait_s(self, tenant: str, look: Appraisal, room: RoomView) -> float:
        """How long a newcomer of the tenant would wait in the room."""
        if not room.waiting:
            return 0.0
        return self._room_s(look, room) * min(1.0, room.ahead(tenant) / room.waiting)

    def _come_back(self, ask: Ask, look: Appraisal, room: RoomView, excess_s: float) -> float | None:
        """Retry-After: the first moment that is not promised to others, once the queue has gone down. None, and no time
        taken from others, for one that would not hear it."""
        if not ask.returns:
            return None
        per_s = room.drain.per_s(ask.now)
        capacity = per_s * self._work_s if per_s is not None and self._work_s else None
        return self._calendar.refuse(identity(ask), look.work_s, capacity, 2.0 * excess_s, ask)

    # What it learns

    def _learn(self, ask: Ask, look: Appraisal) -> None:
        """The typical budget and weight (harmonic: tight and light ones count most), and the typical work."""
        slo = ask.request.slo
        self._budget = _typical(self._budget, slo.ttft_s, STANDARD.ttft_s)
        self._typical_s = _mean(self._typical_s, look.work_s)
        self._per_weight = _mean(self._per_weight, 1.0 / slo.weight)

    def booked(self, ask: Ask, pick: Pick) -> None:
        request, load = ask.request, pick.candidate.load
        missing = max(1, request.prompt_tokens - pick.cached_tokens)
        fill_s = prefill_s(load, missing, pick.cached_tokens)
        context = request.prompt_tokens + request.output_tokens / 2
        work_s = fill_s + request.output_tokens * (load.sequence_s + load.context_s * context)
        self._work_s = _mean(self._work_s, work_s)
        self._tpot_budget = _typical(self._tpot_budget, request.slo.tpot_s, STANDARD.tpot_s)
        self._usage.offered(request.tenant, work_s, admitted=True)
        if request.session:
            held = max(ask.cached, default=0)
            self._sessions.began(request.session, request.prompt_tokens, held, pick.cached_tokens, ask.now)
        self._ahead_s += fill_s
        ahead_s = self._pace.given(load, fill_s, request.slo.tpot_s, ask.now)
        if request.session or ahead_s > 0.5 * self._rule.burst_s or load.ready_at - ask.now > self._rule.hold_least_s:
            self.calm = False

    def ended(self, request: Request, outcome: Outcome) -> None:
        if request.session:
            context = None if outcome.ttft_s is None else request.prompt_tokens + outcome.output_tokens
            self._sessions.ended(request.session, context, outcome.cached_tokens, outcome.now)

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        self._sessions.tick(now)
        self._usage.tick(now)
        self._calendar.forget(now)
        self._kv_booked = _kv_booked(candidates)
        tpot_s = 1.0 / self._tpot_budget if self._tpot_budget else STANDARD.tpot_s
        self._paced = self._pace.mean(candidates, tpot_s)
        loads = [candidate.load for candidate in candidates if candidate.load.available]
        aheads_s = [self._pace.ahead_s(load, tpot_s, now) for load in loads]
        self._ahead_s = sum(aheads_s)
        queue_s = sum(max(0.0, load.ready_at - now) for load in loads) / max(1, len(loads))
        self.calm = (
            not len(self._sessions)
            and not len(self._calendar)
            and queue_s < 0.5 * self._rule.hold_least_s
            and max(aheads_s, default=0.0) <= 0.5 * self._rule.burst_s
            and self._kv_booked < self._rule.kv_share
        )
        if self.calm:
            self.price = 0.0


def _kv_booked(candidates: Sequence[Candidate]) -> float:
    """The share of the fleet's KV that is booked, shared prefixes once; 0 where its size is not known."""
    kv_tokens = fleet_kv_tokens(candidates)
    loads = [each.load for each in candidates if each.load.available]
    return sum(load.timeline.kv_ratio * load.kv_booked for load in loads) / kv_tokens if kv_tokens else 0.0


def _typical(mean: float | None, budget_s: float, standard_s: float) -> float:
    """The running mean of 1 / budget with one more in it; the first is held against the standard class's."""
    known = 1.0 / standard_s if mean is None else mean
    return _mean(mean, min(1.0 / budget_s, TIGHTER * known))


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + LEARN * (value - mean)
