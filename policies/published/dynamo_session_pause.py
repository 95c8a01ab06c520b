"""Dynamo's admission rule: pause sessions while their contexts exceed an engine's KV memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.admission.admission_policy import (
    Admission,
    AdmissionParams,
    RequestOutcome,
    Shed,
    Verdict,
    WaitQueueView,
)
from policies.admission.cap_admission import CapAdmission
from policies.param_types import NonNegative, NonNegativeCount, Positive, PositiveCount
from policies.routing_types import Candidate, Pick, Request, RoutingQuery


class SessionPause(AdmissionParams, frozen=True):
    """An admission policy that pauses sessions while their contexts exceed 0.95 of an engine's KV.

    It pauses sessions until the contexts of the others need at most 0.80 of the KV. New sessions
    are admitted where they fit.

    Source: Dynamo's session-aware queue admission
    (lib/kv-router/src/scheduling/queue_admission/session_aware; ThunderAgent). There, requests of
    paused sessions are held. In the queue here, one held request could block others. So the request
    is refused, with the time of the next decision. The routing policy decides where a session goes.

    pause_threshold       share of an engine's KV above which sessions are paused
    pause_target          share down to which they are paused
    resume_hysteresis     sessions resume only while contexts stay this far below the threshold, as
                          a share of the engine's KV
    resume_timeout_s      a session paused for this long resumes in any case
    scheduler_interval_s  seconds between decisions about pausing and resuming
    acting_token_weight   weight of the context of an idle session when pausing
    acting_decay_tau_s    when resuming, that weight halves after this many idle seconds
    buffer_per_program    number of tokens added to the context of each session
    session_retention_s   seconds for which an idle session is stored
    absent_s              seconds for which a session refused at its first request is stored
    most_sessions         maximum number of stored sessions
    """

    pause_threshold: NonNegative = 0.95
    pause_target: NonNegative = 0.80
    resume_hysteresis: NonNegative = 0.10
    resume_timeout_s: NonNegative = 1800.0
    scheduler_interval_s: Positive = 5.0
    acting_token_weight: NonNegative = 1.0
    acting_decay_tau_s: Positive = 1.0
    buffer_per_program: NonNegativeCount = 100
    session_retention_s: NonNegative = 1800.0
    absent_s: NonNegative = 60.0
    most_sessions: PositiveCount = 65_536

    def build(self) -> Admission:
        return SessionPauser(self)


class Program:
    """A session: the requests of one running agent. Dynamo calls it a program.

    acting_s        time at which the session became idle; None: a request is running
    paused_s        time at which the session was paused; None: it is not paused
    last_request_s  time of the session's last request
    marked          whether the session will be paused when its running answer is complete
    """

    __slots__ = (
        "acting_s",
        "in_flight",
        "last_request_s",
        "marked",
        "paused_s",
        "slot",
        "steps",
        "tokens",
    )

    def __init__(self, tokens: int, now: float) -> None:
        self.tokens = tokens
        self.last_request_s = now
        self.acting_s: float | None = None
        self.paused_s: float | None = None
        self.slot: int | None = None
        self.steps = self.in_flight = 0
        self.marked = False


class SessionPauser(CapAdmission):
    """Pauses sessions of one pool while their contexts do not fit an engine's memory.

    SessionPause describes the rule. Sessions are kept in the order of their last requests.
    """

    __slots__ = ("_kv", "_next_s", "_paused", "_programs", "_rule", "_used")

    def __init__(self, rule: SessionPause) -> None:
        super().__init__()
        self.name, self.is_calm, self.reads_sessions = "session_pause", False, True
        self._rule = rule
        self._programs: dict[str, Program] = {}
        self._paused = 0
        self._used: dict[int, float] = {}
        self._kv: dict[int, float] = {}
        self._next_s = 0.0

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        session, now = query.request.session, query.now
        if (
            not queue.is_new_arrival
            or not session
            or queue.capacity <= 0
            or self._may_enter(query, candidates)
        ):
            return super().decide(query, candidates, queue)
        program = self._programs.get(session)
        if (
            program is None and len(self._programs) < self._rule.most_sessions
        ):  # new sessions do not displace stored ones
            program = self._programs[session] = Program(query.request.prompt_tokens, now)
        if program is not None:
            self._pause(program, now)
            program.last_request_s = now
        retry_s = max(0.0, self._next_s - now) or self._rule.scheduler_interval_s
        used, total = sum(self._used.values()), sum(self._kv.values())
        text = (
            f"Active sessions use {used:.0f} of {total:.0f} tokens of KV "
            f"and {self._paused} sessions are paused"
        )
        return Shed(
            "session_paused", retry_s, f"{text}; this one is checked again in {retry_s:.1f} s."
        )

    def _may_enter(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> bool:
        self._read_capacity(candidates)
        program = self._programs.get(query.request.session)
        if program is not None and program.paused_s is not None:
            return False
        if not self._kv or (
            program is not None and (program.in_flight or program.slot in self._kv)
        ):
            return True
        if program is None and self._paused:
            return False
        needed = query.request.prompt_tokens + self._rule.buffer_per_program
        return any(kv - self._used.get(slot, 0.0) >= needed for slot, kv in self._kv.items())

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        session = query.request.session
        if not session:
            return
        program = self._programs.pop(session, None) or Program(0, query.now)
        self._programs[session] = program
        self._unpause(program, None, query.now)
        self._count(program, -1)
        program.tokens = query.request.prompt_tokens
        program.last_request_s = query.now
        program.slot = pick.candidate.load.slot
        program.steps += 1
        program.in_flight += 1
        self._count(program, +1)
        if len(self._programs) > self._rule.most_sessions:
            self._forget(next(iter(self._programs)))

    def on_ended(self, request: Request, outcome: RequestOutcome) -> None:
        program = self._programs.get(request.session)
        if program is None or not program.in_flight:
            return
        self._count(program, -1)
        program.in_flight -= 1
        program.acting_s = outcome.now
        if outcome.status == "served":
            program.tokens = request.prompt_tokens + outcome.output_tokens
        self._count(program, +1)
        is_last = request.session_hints is not None and request.session_hints.is_last
        if is_last and not program.in_flight and outcome.status != "dropped":
            self._forget(request.session)
        elif program.marked and not program.in_flight:
            self._pause(program, outcome.now)

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        """Drop idle sessions, resume those that fit or are overdue, and pause those that do not
        fit.

        Does so at most every `scheduler_interval_s` seconds.
        """
        if now < self._next_s:
            return
        self._next_s = now + self._rule.scheduler_interval_s
        self._read_capacity(candidates)
        self._expire(now)
        self._resume(now)
        for slot, kv in self._kv.items():
            if self._used.get(slot, 0.0) > self._rule.pause_threshold * kv:
                self._pause_until(slot, self._rule.pause_target * kv, now)

    def _read_capacity(self, candidates: Iterable[Candidate]) -> None:
        loads = [candidate.load for candidate in candidates if candidate.load.is_available]
        self._kv = {load.slot: load.kv_tokens for load in loads if load.kv_tokens is not None}

    def _expire(self, now: float) -> None:
        rule = self._rule
        for session, program in list(self._programs.items()):
            idle_s = now - max(program.last_request_s, program.acting_s or 0.0)
            if not program.in_flight and idle_s > (
                rule.session_retention_s if program.steps else rule.absent_s
            ):
                self._forget(session)

    def _resume(self, now: float) -> None:
        # Resume sessions: those with a waiting client first, then new ones, then the rest.
        #
        # Within each group, sessions with small contexts come first, each where most KV is free.
        rule = self._rule
        ceiling = max(0.0, rule.pause_threshold - rule.resume_hysteresis)
        free = {slot: ceiling * kv for slot, kv in self._kv.items()}
        for program in self._programs.values():
            if program.slot in free:
                free[program.slot] -= self._resident(program, now)
        for program in sorted(
            (program for program in self._programs.values() if program.paused_s is not None),
            key=_resume_order,
        ):
            needed = program.tokens + rule.buffer_per_program
            slot = max(free, key=free.__getitem__, default=None)
            overdue = (
                program.paused_s is not None and now - program.paused_s >= rule.resume_timeout_s
            )
            if slot is not None and (overdue or free[slot] >= needed):
                free[slot] -= needed
                self._unpause(program, slot, now)

    def _pause_until(self, slot: int, target: float, now: float) -> None:
        # Pause idle sessions of a slot, small ones first, until their tokens are at most `target`.
        #
        # If that is not enough, mark the remaining sessions, to be paused after their answers. A
        # session that has just resumed is not paused before the next decision, because its client
        # does not know yet that it was resumed.
        programs = sorted(
            (program for program in self._programs.values() if program.slot == slot),
            key=lambda program: program.tokens,
        )
        for program in programs:
            if self._used.get(slot, 0.0) <= target:
                return
            if not program.in_flight and program.acting_s != now:
                self._pause(program, now)
        for program in programs:
            program.marked = program.marked or bool(program.in_flight)

    def _pause(self, program: Program, now: float) -> None:
        if program.paused_s is None:
            self._count(program, -1)
            program.paused_s, program.slot, program.marked = now, None, False
            self._paused += 1

    def _unpause(self, program: Program, slot: int | None, now: float) -> None:
        if program.paused_s is not None:
            program.paused_s, program.slot, program.acting_s = None, slot, now
            self._paused -= 1
            self._count(program, +1)

    def _forget(self, session: str) -> None:
        program = self._programs.pop(session)
        self._count(program, -1)
        self._paused -= program.paused_s is not None

    def _count(self, program: Program, sign: int) -> None:
        # Add an active session's tokens to its engine (`sign` 1), or subtract them (-1).
        if program.slot is None or program.paused_s is not None:
            return
        weight = self._rule.acting_token_weight if not program.in_flight else 1.0
        tokens = program.tokens * weight + self._rule.buffer_per_program
        self._used[program.slot] = self._used.get(program.slot, 0.0) + sign * tokens

    def _resident(self, program: Program, now: float) -> float:
        # Return the tokens that an active session counts for when other sessions are to resume.
        #
        # The number is halved for every `acting_decay_tau_s` seconds without a request.
        idle_s = (
            0.0
            if program.in_flight or program.acting_s is None
            else max(0.0, now - program.acting_s)
        )
        return (
            float(program.tokens * 2.0 ** (-idle_s / self._rule.acting_decay_tau_s))
            + self._rule.buffer_per_program
        )


def _resume_order(program: Program) -> tuple[int, int]:
    has_request = program.paused_s is not None and program.last_request_s > program.paused_s
    return (1 if program.steps <= 1 else 0 if has_request else 2), program.tokens
