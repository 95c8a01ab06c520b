"""The gateway's part in a replay: what it believes, whom it asks, whom it picks, and what it learns of answers.

It uses the gateway's own parts: the policy, the ledger and the prefix index. When things happen is fleet.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from time import perf_counter
from zlib import crc32

from mockgpu.blocks import blocks_for
from planner.replay.flight import Flight
from planner.replay.group import Group
from planner.replay.options import Options, View
from planner.replay.record import Record
from planner.traces.shape import TraceRequest
from planner.words import BYTES_PER_TOKEN
from policies import run
from policies.contract import Policy
from policies.fingerprint import Fingerprint, of_chain
from policies.model import Ask, Candidate, Pick, Request
from policies.prefix_index import PrefixIndex

INDEX_BYTES = 256 << 20


class Front:
    """Sole owner of the index and of the random numbers. `pick_s`: wall time spent deciding."""

    def __init__(self, policy: Policy, groups: Sequence[Group], options: Options, block_tokens: int) -> None:
        self.policy = policy
        self.groups = groups
        self.rng = Random(f"replay {options.seed}")
        self._losses = Random(f"lost events {options.seed}")
        self._options = options
        self._block_tokens = block_tokens
        self.index = PrefixIndex(INDEX_BYTES)
        for group in groups:
            self.index.set_capacity(group.load.slot, group.kind.capacity_tokens)
        self.candidates = tuple(group.candidate for group in groups)
        self._kv_blocks = [group.engine.scheduler.pool.total for group in groups]
        self._least_kv_blocks = min(self._kv_blocks)
        self.picks, self.pick_s = 0, 0.0

    def request(self, record: Record, one: TraceRequest) -> Request:
        """What the gateway knows of it."""
        patience_s = self._options.clients.patience_s
        return Request(
            id=str(record.number),
            model="model",
            tenant=one.tenant,
            prompt_tokens=one.input_tokens,
            output_tokens=self._options.expected_output or one.output_tokens,
            stream=True,
            slo=record.slo,
            priority=one.priority,
            arrived_s=record.arrived_s,
            deadline_s=None if patience_s is None else record.arrived_s + patience_s,
            session=one.session,
        )

    def fingerprint(self, request: Request, keys: tuple[int, ...]) -> Fingerprint | None:
        """Of the prompt's whole blocks; None when the policy does not read prefixes."""
        if not self.policy.reads_prefix:
            return None
        salt = crc32(request.tenant.encode()) << 32  # tenants never share a key, whatever engines share
        block_bytes, n_bytes = self._block_tokens * BYTES_PER_TOKEN, request.prompt_tokens * BYTES_PER_TOKEN
        return of_chain(keys, block_bytes, n_bytes, salt)

    def ask(self, flight: Flight, now: float) -> Ask:
        """The routing question, with what every group is believed (or known) to hold."""
        request, fingerprint, keys = flight.request, flight.fingerprint, flight.keys
        cached: Sequence[int] = ()
        if self._options.view is View.EXACT and self.policy.reads_prefix:
            size = self._block_tokens
            limit = min(len(keys), (request.prompt_tokens - 1) // size)
            cached = [group.holds(keys, limit) * size for group in self.groups]
        elif fingerprint is not None:
            cached = self.index.match(fingerprint, request.prompt_tokens)
        return Ask(request, now, self.rng, cached, flight.tried, fingerprint)

    def fitting(self, one: TraceRequest) -> Sequence[Candidate]:
        """Groups whose KV could hold prompt and answer."""
        if self.fits_everywhere(one):
            return self.candidates
        return self.holding(one.input_tokens + one.output_tokens, self.candidates)

    def fits_everywhere(self, one: TraceRequest) -> bool:
        """Whether every group's KV could hold prompt and answer."""
        return blocks_for(one.input_tokens + one.output_tokens, self._block_tokens) <= self._least_kv_blocks

    def holding(self, tokens: int, among: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those of them whose KV could hold so many tokens."""
        needed = blocks_for(tokens, self._block_tokens)
        return [each for each in among if needed <= self._kv_blocks[each.load.slot]]

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Pick | None:
        """The policy's choice, timed."""
        began = perf_counter()
        chosen = run.pick(self.policy, ask, candidates)
        self.pick_s += perf_counter() - began
        self.picks += 1
        return chosen

    def learn(self, fingerprint: Fingerprint | None, pick: Pick, prompt_tokens: int) -> None:
        """Our own picks teach the index: the group will hold this prompt soon."""
        if fingerprint is not None and not self._lost():
            load = pick.candidate.load
            self.index.insert(fingerprint, load.slot, prompt_tokens)
            load.held_tokens, load.regret = self.index.held_tokens(load.slot), self.index.regret(load.slot)

    def confirm(self, slot: int, believed_tokens: int, cached_tokens: int, prompt_tokens: int) -> None:
        """A whole answer said what was really cached."""
        if self.policy.reads_prefix and not self._lost():
            self.index.confirm(slot, min(1.0, believed_tokens / prompt_tokens), cached_tokens / prompt_tokens)

    def unlearn(self, fingerprint: Fingerprint | None, slot: int, kept_tokens: int, prompt_tokens: int) -> None:
        """The prompt was never computed there."""
        if fingerprint is not None:
            self.index.trim(fingerprint, slot, kept_tokens, prompt_tokens)

    def forget(self, group: Group) -> None:
        """The group is gone, and all it held."""
        self.index.forget(group.load.slot)
        group.load.held_tokens = 0.0

    def _lost(self) -> bool:
        share = self._options.lost_events
        return share > 0 and self._losses.random() < share
