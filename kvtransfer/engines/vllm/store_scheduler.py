"""Decides in vLLM's scheduler process which KV blocks to load from and save to the host's store.

StoreScheduler looks up the blocks of prompts in the store, chooses how many to load, and instructs
the workers to load them. It also instructs them to save the blocks of ended requests. connector.py
converts vLLM's objects, and store_worker.py copies the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvtransfer.engines.vllm.connector_counters import PendingCounts
from kvtransfer.engines.vllm.unfinished_prompts import PromptChunk, PromptWork
from kvtransfer.layout.block_pieces import block_format
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.store.block_keys import TOKEN_BYTES, Key, block_keys, chain_root, rank_keys
from kvtransfer.store.fetch_rule import FetchRule, PendingFetch, StoredPrefix
from kvtransfer.store.reconnecting_client import StoreConnection
from kvtransfer.store.store_index import IN_MEMORY, ON_DISK

LOOKUP_S = 0.5
"""Seconds for which the result of a request's lookup in the store is reused.

vLLM asks again in every step while the request waits for free blocks.
"""

SAVING_SHARE = 1 / 8
"""Maximum share (0 to 1) of the engine's blocks that may be occupied by saves.

A save keeps the blocks of an ended request until they are copied to the store.
"""


class StoredRequest(msgspec.Struct, frozen=True):
    """The facts about a request that decide under which keys its KV is stored.

    tokens   identifiers of all of its tokens so far, four bytes each, little-endian
    salt     its cache salt, which separates tenants
    variant  text with everything else that changes its KV, such as the adapter's name and the
             identities of images
    """

    id: str
    tokens: bytes
    salt: str = ""
    variant: str = ""


class BlockOrder(msgspec.Struct, frozen=True):
    """The scheduler's instruction to load a request's KV from the store, or to save it there.

    keys    the store's key of each block, the same for all ranks (`rank_keys` derives the keys of
            one rank)
    blocks  the engine's block numbers, in the same order
    """

    request: str
    keys: list[Key]
    blocks: list[int]


class StepWork(msgspec.Struct, frozen=True):
    """How much prompt computation one step of the engine does, by which its duration is predicted.

    tokens  number of prompt tokens
    pairs   sum of their positions in their prompts, which is what attention reads
    """

    tokens: int = 0
    pairs: float = 0.0


class StoreOrders(msgspec.Struct):
    """What the workers must load from and save to the host's KV store in one engine step.

    loads  blocks to load
    saves  blocks to save
    work   the prompts that the step computes
    """

    loads: list[BlockOrder] = []
    saves: list[BlockOrder] = []
    work: StepWork = StepWork()


class StoreReport(msgspec.Struct):
    """How long loads from the KV store and an engine step took, as the workers measured.

    loads   seconds of each load by request, without waiting for other loads
    work    what the measured step computed; None: no step was measured
    step_s  duration of that step

    If several workers are combined, each time is that of the slowest.
    """

    loads: dict[str, float] = {}
    work: StepWork | None = None
    step_s: float = 0.0

    def merged(self, other: StoreReport) -> StoreReport:
        """Combine the reports of two ranks: keep the longer time of each load and of the step."""
        loads = {
            request: max(self.loads.get(request, 0.0), other.loads.get(request, 0.0))
            for request in self.loads.keys() | other.loads.keys()
        }
        return StoreReport(loads, self.work or other.work, max(self.step_s, other.step_s))


class ChosenLoad(msgspec.Struct, frozen=True):
    """What a lookup in the KV store found for a request, and how many blocks to load.

    at_s      time of the lookup
    computed  number of tokens whose KV the engine had then
    tokens    number of tokens of the request
    keys      keys of the blocks after the computed ones
    places    one byte per key: bits for the tiers (memory, disk) that have the block
    count     number of blocks to load
    """

    at_s: float
    computed: int
    tokens: int
    keys: list[Key]
    places: bytes
    count: int


class StoreScheduler:
    """Manages one engine's use of its host's KV store, in vLLM's scheduler process.

    store          connection to the store, for lookups
    compatibility  text with everything that KV depends on besides the layout: model, weights,
                   quantisation, version
    layout         layout of the engine's cache
    step_tokens    maximum number of prompt tokens that a step of the engine computes
    clock          the monotonic clock of this host
    """

    def __init__(
        self,
        store: StoreConnection,
        compatibility: str,
        layout: KvLayout,
        step_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._layout, self._clock = store, layout, clock
        self._compatibility = f"{compatibility}/{block_format(layout)}"
        self._rule = FetchRule(layout.block_tokens, step_tokens)
        self._orders = StoreOrders()
        self._prompts = PromptWork()
        self._keys: dict[str, list[Key]] = {}
        self._chosen: dict[str, ChosenLoad] = {}
        self._used: set[str] = set()
        self._loading: dict[str, PendingFetch] = {}
        self._load_s: dict[str, float] = {}
        self._saving: dict[str, int] = {}
        self.counts = PendingCounts()

    @property
    def has_pending_work(self) -> bool:
        """Return whether blocks are in use by loads or saves, so that the engine must run more
        steps.
        """
        orders = self._orders
        return bool(self._loading or self._saving or orders.loads or orders.saves)

    def loadable_tokens(self, request: StoredRequest, computed: int) -> int:
        """Return the number of tokens after the first `computed` ones to load from the KV store.

        `computed` must be a multiple of the block size. A request is loaded only once.
        """
        if request.id in self._used:
            return 0
        chosen, now = self._chosen.get(request.id), self._clock()
        if chosen is None or chosen.computed != computed or now - chosen.at_s > LOOKUP_S:
            chosen = self._chosen[request.id] = self._look_up(request, computed, now)
        return chosen.count * self._layout.block_tokens

    def _look_up(self, request: StoredRequest, computed: int, now: float) -> ChosenLoad:
        size = self._layout.block_tokens
        tokens = len(request.tokens) // TOKEN_BYTES
        # The last token is always computed: the first output token depends on it.
        keys = self._keys_of(request)[computed // size : (tokens - 1) // size]
        lost = self._store.lost_calls
        places = self._places(keys).partition(b"\0")[0]
        self.counts.add_nonzero("kv_store_lost_calls", self._store.lost_calls - lost)
        others = self._prompts.others(request.id)
        busy_s = sum(self._rule.compute_s(first, last) for first, last in others)
        count = self._rule.choose(StoredPrefix(computed, tokens, places, busy_s), now)
        return ChosenLoad(now, computed, tokens, keys, places, count)

    def _places(self, keys: Sequence[Key]) -> bytes:
        # Return the bits of the tiers that have each block on every rank, those of the slowest one.
        if not keys:
            return b""
        ranks = [rank_keys(keys, rank) for rank in range(self._layout.ranks)]
        missing: list[bytes] = []
        found = self._store.call(lambda client: [client.places(each) for each in ranks], missing)
        if len(found) == 1:
            return found[0]
        return bytes(_slowest(bits) for bits in zip(*found, strict=True))

    def _keys_of(self, request: StoredRequest) -> list[Key]:
        keys, size = self._keys.setdefault(request.id, []), self._layout.block_tokens
        root = keys[-1] if keys else self._root(request)
        keys += block_keys(root, request.tokens[len(keys) * size * TOKEN_BYTES :], size)
        return keys

    def _root(self, request: StoredRequest) -> Key:
        return chain_root(f"{self._compatibility}/{request.variant}", request.salt)

    def begin_load(self, request: str, blocks: Sequence[int], tokens: int) -> None:
        """Instruct the workers to load the request's next `tokens` tokens from the store.

        blocks  numbers of all blocks of the request; those to load follow the computed ones

        Does nothing if the request has nothing to load.
        """
        chosen = self._chosen.pop(request, None)
        if chosen is None:
            return
        self._prompts.begin(request, chosen.computed + tokens, chosen.tokens)
        size = self._layout.block_tokens
        first, count = chosen.computed // size, tokens // size
        self.counts.add_nonzero("kv_store_declined_tokens", (len(chosen.places) - count) * size)
        if not count:
            return
        self._used.add(request)
        self._loading[request] = self._rule.begin(chosen.places[:count], self._clock())
        order = BlockOrder(request, chosen.keys[:count], list(blocks[first : first + count]))
        self._orders.loads.append(order)

    def save(self, request: StoredRequest, blocks: Sequence[int]) -> bool:
        """Instruct the workers to save an ended request's full KV blocks to the store.

        Returns whether there are any. These blocks must not be reused until every worker reports
        the end of its save. The KV of the last token is not computed, so a block that ends with
        this token is not full.
        """
        tokens = len(request.tokens) // TOKEN_BYTES
        count = min((tokens - 1) // self._layout.block_tokens, len(blocks))
        if count <= 0:
            return False
        kept = sum(self._saving.values())
        if kept + count > max(1, self._layout.blocks * SAVING_SHARE):
            self.counts.add("kv_store_skipped_saves")
            return False
        keys = self._keys_of(request)[:count]
        self._saving[request.id] = count
        self._orders.saves.append(BlockOrder(request.id, keys, list(blocks[:count])))
        return True

    def forget(self, request: str) -> None:
        """Drop the lookups of an ended request. A load that has begun continues to its end."""
        self._keys.pop(request, None)
        self._chosen.pop(request, None)
        self._prompts.forget(request)
        self._used.discard(request)

    def on_report(self, report: StoreReport) -> None:
        """Learn the costs of loading and computing from what the workers measured.

        Call it before `on_ended` of the same step.
        """
        for request, seconds in report.loads.items():
            self._load_s[request] = max(seconds, self._load_s.get(request, 0.0))
        if report.work is not None:
            self._rule.on_step(report.work.tokens, report.work.pairs, report.step_s)

    def on_ended(self, sent: Sequence[str], received: Sequence[str], failed: Sequence[str]) -> None:
        """Record that loads and saves have ended, so that their blocks belong to the engine again.

        sent      requests whose saves have ended, among others
        received  requests whose loads have ended, among others
        failed    those of `received` whose blocks were not loaded; they are computed
        """
        for request in sent:
            self._saving.pop(request, None)
        for request in received:
            seconds = self._load_s.pop(request, None)
            pending = self._loading.pop(request, None)
            if pending is not None:
                is_complete = request not in failed and seconds is not None
                self._rule.end(pending, self._clock(), is_complete=is_complete, seconds=seconds)

    def take_orders(self, chunks: Sequence[PromptChunk] = ()) -> StoreOrders:
        """Return the instructions for the workers since the last call, to load and save KV.

        `chunks` is what the next engine step computes.
        """
        self._prompts.on_step(chunks)
        orders, self._orders = self._orders, StoreOrders()
        orders.work = measure_work(chunks)
        return orders


def _slowest(bits: Sequence[int]) -> int:
    if not all(bits):
        return 0
    return IN_MEMORY if all(each & IN_MEMORY for each in bits) else ON_DISK


def measure_work(chunks: Sequence[PromptChunk]) -> StepWork:
    """Return how many prompt tokens a step computes, and how much attention they need.

    A request with one scheduled token decodes, and does not count.
    """
    prompts = [(chunk.computed, chunk.tokens) for chunk in chunks if chunk.tokens > 1]
    return StepWork(
        sum(tokens for _, tokens in prompts),
        sum(tokens * (start + tokens / 2) for start, tokens in prompts),
    )
