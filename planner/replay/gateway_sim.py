"""The gateway's part of a replay: fingerprints, the prefix index, picks, and what it learns.

It uses the gateway's own policy, ledger and prefix index. fleet_sim.py schedules the events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from zlib import crc32

from msgspec.structs import replace

from mockgpu.paged_kv_cache import blocks_for
from planner.replay.block_chain import keys_of
from planner.replay.group_sim import ReplayGroup
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_options import CacheView, ReplayOptions
from planner.replay.results import ReplayRecord
from planner.replay.trace_fingerprint import fingerprint_of_chain
from planner.text_generator import BYTES_PER_TOKEN
from planner.traces.recorded_request import TraceRequest
from policies import routing_algorithm
from policies.candidate_order import create_order
from policies.endpoint_load import LoadChanges
from policies.engine.output_length import DEFAULT_OUTPUT_TOKENS, OutputLengths
from policies.filters import below_cap
from policies.policy_types import Policy
from policies.prefix.fingerprint import Fingerprint
from policies.prefix.prefix_index import PrefixIndex
from policies.routing_types import Candidate, Pick, Request, RoutingQuery

INDEX_BYTES = 256 << 20


class GatewaySim:
    """The gateway of a replay: it picks engines by a real policy, and learns from the results.

    clock         function that returns the wall time in seconds
    index_tokens  tokens per block of the index of cached prompts
    picks         number of routing decisions so far
    pick_s        total wall time of these decisions in seconds
    """

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[ReplayGroup],
        options: ReplayOptions,
        block_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.policy = policy
        filters = tuple(filter_ for filter_ in policy.filters if filter_ is not below_cap)
        self._over_cap = replace(policy, filters=filters)
        self.groups = groups
        self.rng = Random(f"replay {options.seed}")
        self._loss_rng = Random(f"lost events {options.seed}")
        self._options = options
        self._block_tokens = block_tokens
        self.index_tokens = options.index_tokens or block_tokens
        self.index = PrefixIndex(INDEX_BYTES)
        for group in groups:
            self.index.set_capacity(group.load.slot, group.capacity_tokens)
        self.candidates = tuple(group.candidate for group in groups)
        self._order = create_order(policy, self.candidates, LoadChanges())
        self._kv_blocks = [group.engine.largest_blocks for group in groups]
        self._least_kv_blocks = min(self._kv_blocks)
        self.output_lengths = OutputLengths()
        self.picks, self.pick_s = 0, 0.0

    def request(self, record: ReplayRecord, trace_request: TraceRequest) -> Request:
        patience_s = self._options.clients.patience_s
        return Request(
            id=str(record.number),
            model="model",
            tenant=trace_request.tenant,
            prompt_tokens=trace_request.input_tokens,
            output_tokens=self._expected_tokens(record, trace_request),
            stream=True,
            slo=record.slo,
            priority=trace_request.priority,
            arrived_s=record.arrived_s,
            deadline_s=None if patience_s is None else record.arrived_s + patience_s,
            session=trace_request.session,
        )

    def _expected_tokens(self, record: ReplayRecord, trace_request: TraceRequest) -> int:
        if not self._options.learns_lengths:
            return self._options.expected_output or trace_request.output_tokens
        expected = self.output_lengths.estimate("model", record.tenant, record.slo.name)
        return DEFAULT_OUTPUT_TOKENS if expected is None else max(1, round(expected))

    def learn_length(self, record: ReplayRecord) -> None:
        """Record the length of an answer that has ended, to predict the lengths of later ones."""
        self.output_lengths.record("model", record.tenant, record.slo.name, record.output_tokens)

    def fingerprint(
        self, request: Request, trace_request: TraceRequest, keys: tuple[int, ...]
    ) -> Fingerprint | None:
        """Return the fingerprint of the prompt, in blocks of the prefix index.

        `keys` are the ids of its KV blocks. Returns None if the policy reads no prefixes.
        """
        if not self.policy.reads_prefix:
            return None
        if self.index_tokens != self._block_tokens:
            keys = keys_of(trace_request, self.index_tokens)
        # tenants never share a key, even where engines would share a prefix
        salt = crc32(request.tenant.encode()) << 32
        block_bytes = self.index_tokens * BYTES_PER_TOKEN
        n_bytes = request.prompt_tokens * BYTES_PER_TOKEN
        return fingerprint_of_chain(keys, block_bytes, n_bytes, salt)

    def query(self, inflight: InflightRequest, now: float) -> RoutingQuery:
        """Return the policy's input: the request, and how many of its tokens engines have cached.

        The numbers of cached tokens are the gateway's belief. With the option of an exact view,
        they are the true numbers.
        """
        request, fingerprint, keys = inflight.request, inflight.fingerprint, inflight.keys
        cached: Sequence[int] = ()
        if self._options.view is CacheView.EXACT and self.policy.reads_prefix:
            size = self._block_tokens
            limit = min(len(keys), (request.prompt_tokens - 1) // size)
            cached = [group.count_cached(keys, limit) * size for group in self.groups]
        elif fingerprint is not None:
            match = self.index.match if self._order is None else self.index.match_holders
            cached = match(fingerprint, request.prompt_tokens)
        return RoutingQuery(request, now, self.rng, cached, inflight.failed_endpoints, fingerprint)

    def fitting(self, request: TraceRequest) -> Sequence[Candidate]:
        """Return the engines whose KV memory can hold the request's prompt and answer."""
        if self.fits_everywhere(request):
            return self.candidates
        return self.with_room_for(request.input_tokens + request.output_tokens, self.candidates)

    def fits_everywhere(self, request: TraceRequest) -> bool:
        """Return whether every group has enough KV memory for the prompt and the answer."""
        return (
            blocks_for(request.input_tokens + request.output_tokens, self._block_tokens)
            <= self._least_kv_blocks
        )

    def with_room_for(self, tokens: int, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return those of the candidate engines whose KV memory can hold `tokens` tokens."""
        needed = blocks_for(tokens, self._block_tokens)
        return [
            candidate for candidate in candidates if needed <= self._kv_blocks[candidate.load.slot]
        ]

    def pick(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> Pick | None:
        """Return the policy's pick of an engine for a request; None: no engine may serve it.

        The wall time of the decision is added to `pick_s`.
        """
        began = self.clock()
        if self._order is not None and candidates is self.candidates:
            pick = self._order.pick(query)
        else:
            pick = routing_algorithm.pick(self.policy, query, candidates)
        self.pick_s += self.clock() - began
        self.picks += 1
        return pick

    def pick_over_cap(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> Pick | None:
        """Pick a group even if it is at its concurrency limit; its engine then queues the request.

        The gateway does so for an admitted request when no endpoint has free capacity. This can
        happen because hedges (second attempts in parallel) use capacity without a permit. Returns
        None if another filter left no candidate.
        """
        return routing_algorithm.pick(self._over_cap, query, candidates)

    def learn(self, fingerprint: Fingerprint | None, pick: Pick, prompt_tokens: int) -> None:
        """Record in the prefix index that the picked group will have this prompt cached."""
        if fingerprint is not None and not self._is_event_lost():
            load = pick.candidate.load
            self.index.insert(fingerprint, load.slot, prompt_tokens)
            load.prefix_cache_tokens, load.eviction_regret = (
                self.index.cached_tokens(load.slot),
                self.index.eviction_regret(load.slot),
            )

    def confirm(
        self, slot: int, believed_tokens: int, cached_tokens: int, prompt_tokens: int
    ) -> None:
        """Correct the prefix index: an engine has reported how much of a prompt was cached.

        slot             the number of the engine
        believed_tokens  number of prompt tokens that the index had expected to be cached
        cached_tokens    number that the engine reported
        prompt_tokens    number of tokens of the prompt
        """
        if self.policy.reads_prefix and not self._is_event_lost():
            self.index.confirm(
                slot, min(1.0, believed_tokens / prompt_tokens), cached_tokens / prompt_tokens
            )

    def forget_prompt(
        self, fingerprint: Fingerprint | None, slot: int, kept_tokens: int, prompt_tokens: int
    ) -> None:
        """Remove the end of a prompt from the prefix index, because its engine never computed it.

        fingerprint    hashes of the prompt's blocks; None: the index does not have it
        slot           the number of the engine
        kept_tokens    tokens at the beginning that stay in the index
        prompt_tokens  number of tokens of the prompt
        """
        if fingerprint is not None:
            self.index.trim(fingerprint, slot, kept_tokens, prompt_tokens)

    def forget_group(self, group: ReplayGroup) -> None:
        """Remove all entries of a failed group from the prefix index."""
        self.index.forget(group.load.slot)
        group.load.prefix_cache_tokens = 0.0

    def _is_event_lost(self) -> bool:
        share = self._options.lost_events
        return share > 0 and self._loss_rng.random() < share
