"""The rules that a parallel layout must obey, for the commands `size`, `check` and `doctor`.

Each rule has a code, a text about what is valid instead, and a source: a seed (one of five texts on
parallelism that docs/sizing.md lists) or an engine's own rule. A rule finds nothing if it needs a
field of PlannedGroup that is unknown (None).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from policies.sizing.gpu_memory import MemoryCheck, MemoryVerdict
from policies.sizing.layout_facts import ModelFacts
from policies.sizing.parallel_layout import Layout, layers_of_stages

NO_MODEL = ModelFacts(0, None)
MAX_SIZE = 1024


class PlannedGroup(msgspec.Struct, frozen=True):
    """One engine as configured or proposed, and what is known about its model and GPUs.

    layout           its parallel sizes
    facts            properties of its model; None: unknown
    engine           vllm, sglang or trtllm; empty: unknown
    domain           number of GPUs that fast links connect
    has_fast_link    False on GPUs whose only link is PCIe
    gpus             number of GPUs available for this engine
    memory           the memory check, for the longest request
    max_concurrency  maximum number of requests that the gateway sends at once
    min_tp           smallest TP whose memory holds the weights and one request
    step_tokens      max_num_batched_tokens: maximum tokens of one step
    max_seqs         max_num_seqs: maximum number of sequences at a time
    is_chunked       whether long prompts are computed in chunks
    moe_tp           number of ranks over which TensorRT-LLM divides each expert
    moe_ep           number of ranks over which TensorRT-LLM spreads the experts
    all_to_all       SGLang's all-to-all backend, in lower case
    """

    layout: Layout
    facts: ModelFacts | None = None
    engine: str = ""
    domain: int = 8
    has_fast_link: bool = True
    gpus: int | None = None
    memory: MemoryCheck | None = None
    max_concurrency: int | None = None
    min_tp: int | None = None
    step_tokens: int | None = None
    max_seqs: int | None = None
    is_chunked: bool = True
    moe_tp: int | None = None
    moe_ep: int | None = None
    all_to_all: str = ""


class LayoutFinding(msgspec.Struct, frozen=True):
    """The violation of a rule of parallel layouts by a configured engine.

    code      short name of the rule
    is_error  True: the engine cannot start or work; False: a warning
    member    the field of the layout to change
    message   what is wrong
    valid     what is valid instead; empty: unknown
    source    the document or code that contains the rule
    """

    code: str
    is_error: bool
    member: str
    message: str
    valid: str
    source: str

    @property
    def text(self) -> str:
        valid = f"; valid: {self.valid}" if self.valid else ""
        return f"{self.message}{valid} [{self.code}, {self.source}]"


class LayoutRule(msgspec.Struct, frozen=True):
    """A rule that the layout of an engine must obey.

    It may read parallel sizes, engine options and the model. `find` returns (message, what is
    valid) if the engine violates the rule, else None.
    """

    code: str
    member: str
    is_error: bool
    source: str
    find: Callable[[PlannedGroup], tuple[str, str] | None]


def layout_findings(group: PlannedGroup) -> Iterator[LayoutFinding]:
    """Yield a finding for each rule that the engine violates, in the order of RULES."""
    for rule in RULES:
        found = rule.find(group)
        if found is not None:
            message, valid = found
            yield LayoutFinding(rule.code, rule.is_error, rule.member, message, valid, rule.source)


def valid_tp_sizes(facts: ModelFacts, limit: int) -> list[int]:
    """Return the tensor-parallel sizes up to `limit` with which an engine can serve this model."""
    return [tp for tp in range(1, limit + 1) if heads_problem(facts, tp) is None]


def valid_ep_sizes(facts: ModelFacts, ranks: int) -> list[int]:
    """Return the expert-parallel sizes that spread the model's experts evenly.

    They are divisors of `ranks`, the number of ranks of the engine.
    """
    return [ep for ep in divisors(ranks) if facts.experts and facts.experts % ep == 0]


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive integer in ascending order.

    They are the sizes into which, for example, a number of ranks or layers divides evenly.
    """
    return [size for size in range(1, number + 1) if number % size == 0]


def heads_problem(facts: ModelFacts, tp: int) -> str | None:
    """Return why an engine with this TP size cannot start; None: it can.

    By vLLM's rules, TP must divide the query heads, and KV heads must be divided or replicated
    evenly.
    """
    if facts.heads % tp:
        return f"{facts.heads} attention heads cannot be divided by tp {tp}"
    kv_heads = facts.kv_heads
    if kv_heads is not None and kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads can be neither divided by tp {tp} nor replicated over it"
    return None


def _numbers(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"


def _heads(group: PlannedGroup) -> tuple[str, str] | None:
    facts, tp = group.facts, group.layout.tp
    problem = None if facts is None else heads_problem(facts, tp)
    if facts is None or problem is None:
        return None
    return f"{problem}: the engine does not start", _numbers(valid_tp_sizes(facts, facts.heads))


def _guessed_heads(group: PlannedGroup) -> tuple[str, str] | None:
    tp = group.layout.tp
    if group.facts is not None or not tp & (tp - 1) or tp > group.domain:
        return None
    text = (
        f"tp {tp} does not divide the attention heads of most models, "
        "and the shape of this model is unknown"
    )
    return text, ""


def _replicated(group: PlannedGroup) -> tuple[str, str] | None:
    facts, tp = group.facts, group.layout.tp
    if facts is None or facts.kv_heads is None or tp <= facts.kv_heads or facts.heads % tp:
        return None
    text = (
        f"tp {tp} is more than the {facts.kv_heads} KV heads: each is kept "
        f"{tp // facts.kv_heads} times, so the KV cache grows no further than at tp "
        f"{facts.kv_heads}"
    )
    return text, f"tp up to {facts.kv_heads}, and pp for the rest"


def _stages(group: PlannedGroup) -> tuple[str, str] | None:
    layers = None if group.facts is None else group.facts.layers
    pp = group.layout.pp
    if layers is None or pp <= layers:
        return None
    return f"{layers} layers cannot fill pp {pp} stages", f"1 to {layers}"


def _uneven(group: PlannedGroup) -> tuple[str, str] | None:
    layers = None if group.facts is None else group.facts.layers
    pp = group.layout.pp
    if layers is None or pp > layers or layers % pp == 0:
        return None
    most = max(layers_of_stages(layers, pp))
    text = f"{layers} layers over pp {pp}: the stages of {most} layers limit speed and KV"
    return text, _numbers(divisors(layers)[:12])


def _dense(group: PlannedGroup) -> tuple[str, str] | None:
    if group.facts is None or group.facts.experts or group.layout.ep == 1:
        return None
    return f"ep {group.layout.ep} on a model without experts", "1"


def _ranks(group: PlannedGroup) -> tuple[str, str] | None:
    layout = group.layout
    ranks = layout.tp * layout.dp
    if ranks % layout.ep:
        text = f"ep {layout.ep} does not divide tp * dp = {ranks}, the ranks of experts"
        return text, _numbers(divisors(ranks))
    if group.engine == "vllm" and layout.ep not in (1, ranks):
        return f"vLLM spreads experts over all tp * dp = {ranks} ranks, or over none", f"1, {ranks}"
    return None


def _experts(group: PlannedGroup) -> tuple[str, str] | None:
    facts, layout = group.facts, group.layout
    if facts is None or not facts.experts or facts.experts % layout.ep == 0:
        return None
    valid = _numbers(valid_ep_sizes(facts, layout.tp * layout.dp))
    return f"{facts.experts} experts cannot be spread evenly over ep {layout.ep}", valid


EQUAL_RANKS = frozenset({"deepep", "mooncake", "nixl"})


def _backend(group: PlannedGroup) -> tuple[str, str] | None:
    layout = group.layout
    if group.engine != "sglang" or group.all_to_all not in EQUAL_RANKS or layout.ep == layout.tp:
        return None
    text = f"SGLang's {group.all_to_all} needs ep = tp, and they are {layout.ep} and {layout.tp}"
    return text, f"ep {layout.tp}"


def _product(group: PlannedGroup) -> tuple[str, str] | None:
    tp, moe_tp, moe_ep = group.layout.tp, group.moe_tp, group.moe_ep
    if moe_tp is None or moe_ep is None or moe_tp * moe_ep == tp:
        return None
    pairs = ", ".join(f"{tp // ep} x {ep}" for ep in divisors(tp))
    text = (
        f"moe_tensor_parallel_size {moe_tp} x moe_expert_parallel_size {moe_ep} is not "
        f"tensor_parallel_size {tp}"
    )
    return text, pairs


def _gpus(group: PlannedGroup) -> tuple[str, str] | None:
    if group.gpus is None or group.layout.gpus <= group.gpus:
        return None
    text = f"{group.layout.label} takes {group.layout.gpus} GPUs, and there are {group.gpus}"
    return text, f"tp * pp * dp up to {group.gpus}"


def _domain(group: PlannedGroup) -> tuple[str, str] | None:
    tp, domain = group.layout.tp, group.domain
    if tp <= domain:
        return None
    text = (
        f"tp {tp} crosses link domains of {domain} GPUs, so every layer waits for the "
        "network; set hardware.link_domain_gpus if they are larger"
    )
    return text, f"tp up to {domain}, and pp across domains"


def _exchange(group: PlannedGroup) -> tuple[str, str] | None:
    ep, domain = group.layout.ep, group.domain
    if ep <= max(domain, group.layout.tp):
        return None
    text = (
        f"ep {ep} crosses link domains of {domain} GPUs: every expert layer waits for the network"
    )
    return text, f"ep up to {domain}, or RDMA between all of them"


def _slow_link(group: PlannedGroup) -> tuple[str, str] | None:
    if group.has_fast_link or group.layout.tp == 1:
        return None
    return f"tp {group.layout.tp} over PCIe: collectives take much of each step", "pp, or replicas"


def _loads(group: PlannedGroup) -> tuple[str, str] | None:
    memory = group.memory
    if memory is None or memory.verdict is not MemoryVerdict.DOES_NOT_LOAD:
        return None
    text = f"{memory.weights_bytes / 1e9:.1f} GB of weights per GPU do not fit"
    return text, "more tp or pp, or weights of fewer bytes"


def _context(group: PlannedGroup) -> tuple[str, str] | None:
    memory = group.memory
    if memory is None or memory.verdict is not MemoryVerdict.SERVES_NONE:
        return None
    text = (
        f"the KV cache holds {memory.tokens:,} tokens, fewer than one request of "
        f"{memory.demand.context:,}"
    )
    return text, f"max-model-len up to {memory.tokens:,}, more tp or pp, or fp8 weights"


def _cap(group: PlannedGroup) -> tuple[str, str] | None:
    memory, cap = group.memory, group.max_concurrency
    if memory is None or cap is None or not memory.served or cap <= memory.served:
        return None
    text = (
        f"max_concurrency {cap} is more than the {memory.served} requests of "
        f"{memory.demand.context:,} tokens that the KV cache holds"
    )
    return text, f"up to {memory.served}"


def _over_sharded(group: PlannedGroup) -> tuple[str, str] | None:
    tp, least = group.layout.tp, group.min_tp
    if least is None or tp < 4 * least:
        return None
    text = f"tp {tp} where tp {least} holds the model: collectives take a part of each step"
    return text, f"tp {least} and {tp // least} replicas, unless a promise needs the speed"


def _chunk(group: PlannedGroup) -> tuple[str, str] | None:
    step, seqs, memory = group.step_tokens, group.max_seqs, group.memory
    if step is None:
        return None
    if seqs is not None and step < seqs:
        return f"max_num_batched_tokens {step} is less than max_num_seqs {seqs}", f"{seqs} and more"
    if not group.is_chunked and memory is not None and step < memory.demand.context:
        text = f"without chunked prefill, a step of {step} tokens cannot hold the longest prompt"
        return text, f"{memory.demand.context} and more, or chunked prefill"
    return None


RULES: tuple[LayoutRule, ...] = (
    LayoutRule("tp-heads", "tp", True, "vLLM; seed 003", _heads),
    LayoutRule("tp-unknown-heads", "tp", False, "seed 003", _guessed_heads),
    LayoutRule("tp-kv-heads", "tp", False, "seed 000", _replicated),
    LayoutRule("pp-layers", "pp", True, "vLLM", _stages),
    LayoutRule("pp-uneven", "pp", False, "seed 001", _uneven),
    LayoutRule("ep-dense", "ep", True, "seeds 001, 004", _dense),
    LayoutRule("ep-ranks", "ep", True, "seed 004", _ranks),
    LayoutRule("ep-experts", "ep", True, "seed 004", _experts),
    LayoutRule("ep-backend", "ep", True, "seed 004", _backend),
    LayoutRule("moe-product", "tp", True, "seed 004", _product),
    LayoutRule("gpus", "tp", True, "seed 003", _gpus),
    LayoutRule("tp-domain", "tp", False, "seeds 001, 003, 004", _domain),
    LayoutRule("ep-domain", "ep", False, "seed 004", _exchange),
    LayoutRule("tp-slow-link", "tp", False, "seeds 001, 003", _slow_link),
    LayoutRule("weights", "tp", True, "seeds 001, 002", _loads),
    LayoutRule("context-kv", "tp", True, "seed 003", _context),
    LayoutRule("cap-kv", "tp", False, "seed 003", _cap),
    LayoutRule("tp-too-large", "tp", False, "seed 003", _over_sharded),
    LayoutRule("chunk", "tp", True, "vLLM; seed 003", _chunk),
)
