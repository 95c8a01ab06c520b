"""Dynamo's session-aware admission: sessions pause when their contexts outgrow an engine's KV, and resume below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.admission import Admission, AdmissionPreset, Cap, Outcome, RoomView, Shed, Verdict
from policies.bounds import Amount, Count, Number, Positive
from policies.model import Ask, Candidate, Pick, Request


class SessionPause(AdmissionPreset, frozen=True):
    """Sessions pause while an engine's contexts exceed 0.95 of its KV, until 0.80; others enter where they fit.

    Dynamo's session-aware queue admission (lib/kv-router/src/scheduling/queue_admission/session_aware; ThunderAgent).
    There a paused session's request is held; a line that one request may block cannot do that, so here it is refused
    and told when it is looked at again. Where a session goes is the policy's choice, not this rule's.

    pause_threshold, pause_target    share of an engine's KV above which sessions pause, and down to which
    resume_hysteresis                how far below the threshold resuming stays
    resume_timeout_s                 a session paused for so long resumes in any case
    scheduler_interval_s             how often pausing and resuming are decided
    acting_token_weight              weight of the context of a session that is not being answered, when pausing
    acting_decay_tau_s               ... and the half-life of that weight when resuming
    buffer_per_program               tokens that a session counts for besides its context
    session_retention_s, absent_s    how long a silent session is remembered, and one that was refused before its first
    most_sessions                    remembered at most
    """

    pause_threshold: Amount = 0.95
    pause_target: Amount = 0.80
    resume_hysteresis: Amount = 0.10
    resume_timeout_s: Amount = 1800.0
    scheduler_interval_s: Positive = 5.0
    acting_token_weight: Amount = 1.0
    acting_decay_tau_s: Positive = 1.0
    buffer_per_program: Count = 100
    session_retention_s: Amount = 1800.0
    absent_s: Amount = 60.0
    most_sessions: Number = 65_536

    def build(self) -> Admission:
        return SessionPauser(self)


class Program:
    """One session. `acting_s`: since when it is not being answered; `paused_s`: since when it is paused, None if it
    is not; `asked_s`: when it last came; `marked`: it pauses as soon as its answer is whole."""

    __slots__ = (
        "acting_s",
        "asked_s",
        "in_flight",
        "marked",
        "paused_s",
        "slot",
        "steps",
        "tokens",
    )

    def __init__(self, tokens: int, now: float) -> None:
        self.tokens = tokens
        self.asked_s = now
        self.acting_s: float | None = None
        self.paused_s: float | None = None
        self.slot: int | None = None
        self.steps = self.in_flight = 0
        self.marked = False


class SessionPauser(Cap):
    """The sessions of one pool, in the order of their last requests. One owner."""

    __slots__ = ("_kv", "_next_s", "_paused", "_programs", "_rule", "_used")

    def __init__(self, rule: SessionPause) -> None:
        super().__init__()
        self.name, self.calm = "session_pause", False
        self._rule = rule
        self._programs: dict[str, Program] = {}
        self._paused = 0
        self._used: dict[int, float] = {}
        self._kv: dict[int, float] = {}
        self._next_s = 0.0

    def judge(self, ask: Ask, candidates: Sequence[Candidate], room: RoomView) -> Verdict:
        session, now = ask.request.session, ask.now
        if (
            not room.at_door
            or not session
            or room.capacity <= 0
            or self._may_enter(ask, candidates)
        ):
            return super().judge(ask, candidates, room)
        one = self._programs.get(session)
        if (
            one is None and len(self._programs) < self._rule.most_sessions
        ):  # strangers push nobody out
            one = self._programs[session] = Program(ask.request.prompt_tokens, now)
        if one is not None:
            self._pause(one, now)
            one.asked_s = now
        again_s = max(0.0, self._next_s - now) or self._rule.scheduler_interval_s
        used, total = sum(self._used.values()), sum(self._kv.values())
        told = f"Active sessions hold {used:.0f} of {total:.0f} tokens of KV and {self._paused} sessions are paused"
        return Shed(
            "session_paused", again_s, f"{told}; this one is looked at again in {again_s:.1f} s."
        )

    def _may_enter(self, ask: Ask, candidates: Sequence[Candidate]) -> bool:
        self._see(candidates)
        one = self._programs.get(ask.request.session)
        if one is not None and one.paused_s is not None:
            return False
        if not self._kv or (one is not None and (one.in_flight or one.slot in self._kv)):
            return True
        if one is None and self._paused:
            return False
        needed = ask.request.prompt_tokens + self._rule.buffer_per_program
        return any(kv - self._used.get(slot, 0.0) >= needed for slot, kv in self._kv.items())

    def booked(self, ask: Ask, pick: Pick) -> None:
        session = ask.request.session
        if not session:
            return
        one = self._programs.pop(session, None) or Program(0, ask.now)
        self._programs[session] = one
        self._unpause(one, None, ask.now)
        self._count(one, -1)
        one.tokens, one.asked_s, one.slot = (
            ask.request.prompt_tokens,
            ask.now,
            pick.candidate.load.slot,
        )
        one.steps += 1
        one.in_flight += 1
        self._count(one, +1)
        if len(self._programs) > self._rule.most_sessions:
            self._forget(next(iter(self._programs)))

    def ended(self, request: Request, outcome: Outcome) -> None:
        one = self._programs.get(request.session)
        if one is None or not one.in_flight:
            return
        self._count(one, -1)
        one.in_flight -= 1
        one.acting_s = outcome.now
        if outcome.ended == "served":
            one.tokens = request.prompt_tokens + outcome.output_tokens
        self._count(one, +1)
        if one.marked and not one.in_flight:
            self._pause(one, outcome.now)

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        """Every `scheduler_interval_s`: forget the silent, resume what fits or is overdue, pause what is too much."""
        if now < self._next_s:
            return
        self._next_s = now + self._rule.scheduler_interval_s
        self._see(candidates)
        self._expire(now)
        self._resume(now)
        for slot, kv in self._kv.items():
            if self._used.get(slot, 0.0) > self._rule.pause_threshold * kv:
                self._pause_until(slot, self._rule.pause_target * kv, now)

    def _see(self, candidates: Iterable[Candidate]) -> None:
        loads = [each.load for each in candidates if each.load.available]
        self._kv = {load.slot: load.kv_tokens for load in loads if load.kv_tokens is not None}

    def _expire(self, now: float) -> None:
        rule = self._rule
        for session, one in list(self._programs.items()):
            silent_s = now - max(one.asked_s, one.acting_s or 0.0)
            if not one.in_flight and silent_s > (
                rule.session_retention_s if one.steps else rule.absent_s
            ):
                self._forget(session)

    def _resume(self, now: float) -> None:
        """Those who ask first, then new ones, then the rest, small before large, each where most is free."""
        rule = self._rule
        ceiling = max(0.0, rule.pause_threshold - rule.resume_hysteresis)
        free = {slot: ceiling * kv for slot, kv in self._kv.items()}
        for one in self._programs.values():
            if one.slot in free:
                free[one.slot] -= self._resident(one, now)
        for one in sorted(
            (one for one in self._programs.values() if one.paused_s is not None), key=_turn
        ):
            needed = one.tokens + rule.buffer_per_program
            slot = max(free, key=free.__getitem__, default=None)
            overdue = one.paused_s is not None and now - one.paused_s >= rule.resume_timeout_s
            if slot is not None and (overdue or free[slot] >= needed):
                free[slot] -= needed
                self._unpause(one, slot, now)

    def _pause_until(self, slot: int, target: float, now: float) -> None:
        """Silent sessions pause, small ones first; if that is not enough, the others as soon as they are answered.

        One that has just resumed keeps its place until the next look: its client has yet to hear of it.
        """
        here = sorted(
            (one for one in self._programs.values() if one.slot == slot), key=lambda one: one.tokens
        )
        for one in here:
            if self._used.get(slot, 0.0) <= target:
                return
            if not one.in_flight and one.acting_s != now:
                self._pause(one, now)
        for one in here:
            one.marked = one.marked or bool(one.in_flight)

    def _pause(self, one: Program, now: float) -> None:
        if one.paused_s is None:
            self._count(one, -1)
            one.paused_s, one.slot, one.marked = now, None, False
            self._paused += 1

    def _unpause(self, one: Program, slot: int | None, now: float) -> None:
        if one.paused_s is not None:
            one.paused_s, one.slot, one.acting_s = None, slot, now
            self._paused -= 1
            self._count(one, +1)

    def _forget(self, session: str) -> None:
        one = self._programs.pop(session)
        self._count(one, -1)
        self._paused -= one.paused_s is not None

    def _count(self, one: Program, sign: int) -> None:
        """Puts an active session's tokens on, or takes them off, what its engine holds."""
        if one.slot is None or one.paused_s is not None:
            return
        weight = self._rule.acting_token_weight if not one.in_flight else 1.0
        tokens = one.tokens * weight + self._rule.buffer_per_program
        self._used[one.slot] = self._used.get(one.slot, 0.0) + sign * tokens

    def _resident(self, one: Program, now: float) -> float:
        """What an active session counts for when others are to resume: halved for every tau of silence."""
        idle_s = 0.0 if one.in_flight or one.acting_s is None else max(0.0, now - one.acting_s)
        return (
            float(one.tokens * 2.0 ** (-idle_s / self._rule.acting_decay_tau_s))
            + self._rule.buffer_per_program
        )


def _turn(one: Program) -> tuple[int, int]:
    asks = one.paused_s is not None and one.asked_s > one.paused_s
    return (1 if one.steps <= 1 else 0 if asks else 2), one.tokens
