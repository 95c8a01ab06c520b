"""Shadow policies: they answer the routing questions that another policy answers for real, and send nothing anywhere.

Lives here: what is noted at a pick, who is asked afterwards, what came of it. A request waits for none of it: its line
leaves a note, and the scoring follows in a later turn of the loop, when its bytes have gone. Not here: policies, and
who serves a part of the requests in earnest (canary.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from time import perf_counter
from typing import Protocol

import msgspec

from gateway.endpoints import EndpointTable
from gateway.exchange import Exchange
from gateway.explain import numbers_of, restored
from gateway.metrics import Metrics
from gateway.openai import Call
from policies import run
from policies.contract import Policy
from policies.latency import ttft_s
from policies.model import Ask, Candidate, Pick

log = logging.getLogger("penstock")

SHARE = 0.1
"""All shadows of a pool together take so much of the time of its own picks, and see fewer requests for it; the notes
take up to as much again."""

RESULTS = ("agreed", "differed", "nobody", "failed")
FIRST_COST_S = 0.0005  # of one scoring, until one was measured
MOST_NOTES = 64  # that wait to be scored
MIN_COMPARED = 100  # picks; the agreement is then known to about ten points
SAVED_S = 0.01  # of allowance; a quiet hour is not spent in one second


class Asked(Protocol):
    """What must be known of the route that was asked."""

    @property
    def name(self) -> str: ...
    @property
    def candidates(self) -> Sequence[Candidate]: ...


class Named(msgspec.Struct, frozen=True):
    """A policy and what it is called among the shadows of its pool."""

    name: str
    policy: Policy


class Note(msgspec.Struct, frozen=True):
    """A pick as it was made. `numbers` are the picked endpoint's before it was booked: those alone change with it."""

    ask: Ask
    pick: Pick
    candidates: Sequence[Candidate]
    call: Call
    model: str
    numbers: tuple[object, ...] | None


class Verdict(msgspec.Struct, frozen=True):
    """What a shadow said of a pick. `sooner_s`: how much sooner it expects the first token, None where nothing is
    believed of speeds; `more_tokens`: of the prompt that it finds cached beyond what the pick found."""

    result: str
    sooner_s: float | None = None
    more_tokens: int = 0


def judged(policy: Policy, ask: Ask, pick: Pick, then: Sequence[Candidate]) -> Verdict:
    """What `policy` makes of a question that `pick` answered, the candidates being as they were `then`."""
    other = run.pick(policy, ask, then)
    if other is None:
        return Verdict("nobody")
    chosen, own = other.candidate, pick.candidate
    if chosen.endpoint.name == own.endpoint.name:
        return Verdict("agreed", 0.0 if chosen.load.believed else None)
    was = next(each for each in then if each.load.slot == own.load.slot)
    held, kept, prompt = _held(ask, was), _held(ask, chosen), ask.request.prompt_tokens
    sooner_s = None
    if was.load.believed and chosen.load.believed:
        sooner_s = ttft_s(was.load, prompt - held, held, ask.now) - ttft_s(chosen.load, prompt - kept, kept, ask.now)
    return Verdict("differed", sooner_s, kept - held)


def _held(ask: Ask, candidate: Candidate) -> int:
    slot = candidate.load.slot
    return min(ask.request.prompt_tokens, ask.cached[slot]) if slot < len(ask.cached) else 0


class Shadows:
    """The shadow policies of one pool, each with a state of its own. Live while configured as they are."""

    def __init__(self, pool: str, policies: Sequence[Named], endpoints: EndpointTable, primary: Policy) -> None:
        self.pool = pool
        self.policies = tuple(policies)
        self._endpoints = endpoints
        self._teaches = not primary.reads_prefix and any(each.policy.reads_prefix for each in policies)
        self._rng = Random(endpoints.rng.random())
        self._notes: deque[Note] = deque(maxlen=MOST_NOTES)
        self._due = False
        self._allowed_s = self._picks_s = self._cost_s = 0.0
        self._each_s = FIRST_COST_S
        self._picks = self._scored = 0
        self._metrics: Metrics | None = None

    def follow(self, metrics: Metrics) -> None:
        """From now on it counts here."""
        self._metrics = metrics

    def leave(self, metrics: Metrics) -> None:
        """Others take its place, or nobody: its series go, and what it is asked from now on counts nowhere."""
        self._metrics = None
        trials = metrics.trials
        for family in (trials.picks, trials.cost, trials.ttft, trials.tokens):
            family.forget("pool", self.pool)

    def picked(self, x: Exchange, route: Asked, ask: Ask, pick: Pick) -> None:
        """A pick, before its place is taken. What takes longer than a note comes later."""
        if x.call is None or x.picked_at is None:
            return
        took_s = x.picked_at - ask.now
        self._picks += 1
        self._picks_s += took_s
        allowed_s = self._allowed_s = self._allowed_s + SHARE * took_s
        waiting = len(self._notes)
        sampled = allowed_s > self._each_s * (1 + waiting) and waiting < MOST_NOTES
        teaches = self._teaches and ask.fingerprint is None
        if not (sampled or teaches):
            return
        numbers = numbers_of(pick.candidate.load) if sampled else None
        self._notes.append(Note(ask, pick, route.candidates, x.call, route.name, numbers))
        if not self._due:
            self._due = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._score)  # what this turn has to send goes out before that

    def _score(self) -> None:
        self._due = False
        notes, self._notes = self._notes, deque(maxlen=MOST_NOTES)
        for note in notes:
            began = perf_counter()
            try:
                self._one(note)
            except Exception:
                log.exception("a shadow of pool %s failed", self.pool)
            took_s = perf_counter() - began
            self._cost_s += took_s
            if note.numbers is not None:
                self._each_s += 0.1 * (took_s - self._each_s)
                self._allowed_s = min(SAVED_S, self._allowed_s) - took_s

    def _one(self, note: Note) -> None:
        ask = self._read(note) if self._teaches and note.ask.fingerprint is None else note.ask
        if note.numbers is None:
            return
        self._scored += 1
        own = note.pick.candidate
        was = Candidate(own.endpoint, restored(own, note.numbers))
        then = tuple(was if each.load is own.load else each for each in note.candidates)
        ask = msgspec.structs.replace(ask, rng=self._rng)
        for each in self.policies:
            began = perf_counter()
            try:
                verdict = judged(each.policy, ask, note.pick, then)
            except Exception:  # a policy may be anybody's, and this one serves nobody
                log.exception("shadow policy %s of pool %s failed", each.name, self.pool)
                verdict = Verdict("failed")
            self._count(each.name, verdict, perf_counter() - began)

    def _read(self, note: Note) -> Ask:
        """The question with the prompt's fingerprint, which nobody else of this pool takes; and the index is taught."""
        call, prompt_tokens = note.call, note.call.request.prompt_tokens
        if not call.prompt:  # it was over before its turn came
            return note.ask
        prefixes = self._endpoints.prefixes
        fingerprint = prefixes.of(call, note.model)
        cached = tuple(prefixes.cached(fingerprint, prompt_tokens))
        self._endpoints.learn(fingerprint, note.pick.candidate.load, prompt_tokens)
        return msgspec.structs.replace(note.ask, cached=cached, fingerprint=fingerprint)

    def _count(self, name: str, verdict: Verdict, took_s: float) -> None:
        metrics = self._metrics
        if metrics is None:
            return
        pool, trials, sooner_s = self.pool, metrics.trials, verdict.sooner_s
        trials.picks.labels(pool, name, verdict.result).value += 1.0
        trials.cost.labels(pool, name).value += took_s
        if sooner_s:
            trials.ttft.labels(pool, name, "sooner" if sooner_s > 0 else "later").value += abs(sooner_s)
        if verdict.more_tokens:
            way = "more" if verdict.more_tokens > 0 else "fewer"
            trials.tokens.labels(pool, name, way).value += abs(verdict.more_tokens)

    def told(self) -> dict[str, object]:
        """What came of it so far, as plain values; the pick's own time beside its shadows'."""
        return {
            "pool": self.pool,
            "picks": self._picks,
            "scored": self._scored,
            "pick_us": round(1e6 * self._picks_s / self._picks, 2) if self._picks else None,
            "cost_share": round(self._cost_s / self._picks_s, 4) if self._picks_s else None,
            "policies": [self._one_told(each.name) for each in self.policies],
        }

    def _one_told(self, name: str) -> dict[str, object]:
        if self._metrics is None:
            return {"policy": name}
        pool, trials = self.pool, self._metrics.trials
        found = {result: trials.picks.labels(pool, name, result).value for result in RESULTS}
        scored, answered = sum(found.values()), found["agreed"] + found["differed"]
        sooner_s = trials.ttft.labels(pool, name, "sooner").value - trials.ttft.labels(pool, name, "later").value
        tokens = trials.tokens.labels(pool, name, "more").value - trials.tokens.labels(pool, name, "fewer").value
        return {
            "policy": name,
            **{result: int(count) for result, count in found.items()},
            "conclusive": answered >= MIN_COMPARED,
            "agreement": round(found["agreed"] / answered, 4) if answered else None,
            "ttft_gain_s": round(sooner_s / answered, 6) if answered else None,
            "cached_tokens_gain": round(tokens / answered, 1) if answered else None,
            "cost_us": round(1e6 * trials.cost.labels(pool, name).value / scored, 2) if scored else None,
        }


def named(specs: Sequence[tuple[str, Mapping[str, object], Policy]]) -> tuple[Named, ...]:
    """Policies by their own name, with their parameters where two of a pool have one name."""
    names = [name for name, _, _ in specs]
    return tuple(
        Named(name if names.count(name) == 1 else f"{name}({_shown(params)})", policy) for name, params, policy in specs
    )


def _shown(params: Mapping[str, object]) -> str:
    return ",".join(f"{key}={value}" for key, value in params.items())
