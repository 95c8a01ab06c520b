"""The description of a replayed fleet: kinds of groups (engines), from a preset, a file or code."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

import msgspec

from mockgpu.timing.layout_times import (
    LockstepTimes,
    SlowestRank,
    shared_experts_for,
    step_times_for,
)
from mockgpu.timing.ranked_engine import RankedEngine
from mockgpu.timing.roofline import Profile, StepTimes, profile_named
from planner.replay.rank_choice import RankChoice
from planner.text_generator import BLOCK_TOKENS
from policies.pricing.split_decision import SplitRule
from policies.routing_types import Role
from policies.sizing.gpu_memory import Demand, check_memory
from policies.sizing.gpus import Gpu, gpu_named
from policies.sizing.layout_facts import facts_of
from policies.sizing.model_shapes import Llm, model_named
from policies.sizing.parallel_layout import Layout
from policies.sizing.parallelism_rules import MAX_SIZE, PlannedGroup, layout_findings

MOST_GROUPS = 4096
MOST_SKEW = 64.0


class FleetError(ValueError):
    """Raised if the description of a fleet is invalid.

    The message contains the problem and its place.
    """


class GroupKind(RankedEngine, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of equal groups in a fleet; there are `count` of them. A group is one engine.

    model                    name of the model
    gpu                      GPU type
    tp                       tensor-parallel size
    role                     the phases of requests that the groups serve
    kv_tokens                KV capacity of each group in tokens; None: as many as its memory allows
    kv_scalar_bytes          bytes per cached scalar: 2 normally, 1 for an fp8 cache
    max_num_seqs             the engine's maximum number of sequences at a time
    max_num_batched_tokens   the engine's maximum tokens of one step
    max_concurrency          the gateway's limit of concurrent requests per group
    slowness                 factor on the duration of the group's steps, unknown to the gateway
    up_at_s                  time at which the group joins the fleet, with an empty cache
    link_gb_s                speed of the group's link for the KV of split requests, in GB/s per
                             direction
    store_gb                 memory of the group's host for its store of KV blocks, in GB; 0: it
                             has no store
    store_gb_s               speed between that memory and the group's GPUs, in GB/s per direction
    store_disk_gb            disk of the same store, in GB
    store_disk_gb_s          speed from that disk to memory, in GB/s
    labelled_gpu             GPU type in the gateway's configuration; empty: the true type
    labelled_batched_tokens  max_num_batched_tokens in the gateway's configuration; None: the true
                             value
    labelled_num_seqs        max_num_seqs in the gateway's configuration; None: the gateway must
                             learn it
    knows_model              whether the gateway knows the model's exact shape. If not, it starts
                             with costs estimated from the labelled GPU, the layout and the next two
                             fields, like a gateway with a configuration
    labelled_params_b        billions of parameters in the gateway's configuration; None: none
    labelled_active_b        billions of parameters that one token uses, in the same place
    pp                       pipeline-parallel size of the group
    ep                       expert-parallel size
    dp                       data-parallel size
    cp                       context-parallel size
    ep_skew                  work of the busiest expert-parallel rank divided by the mean, at least
                             1
    ranks                    number of data-parallel ranks of each engine that requests can address.
                             Each has its own scheduler, limit and `kv_tokens`; they share their
                             experts if ep exceeds tp
    lockstep                 whether the steps of these ranks begin and end together; None: if they
                             share their experts
    rank_choice              whether the gateway or the engine chooses the rank of a request
    """

    model: str = "llama-3.1-70b-fp8"
    gpu: str = "h100"
    tp: int = 4
    count: int = 1
    role: Role = Role.BOTH
    kv_tokens: int | None = None
    kv_scalar_bytes: float = 2.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_concurrency: int = 256
    slowness: float = 1.0
    up_at_s: float = 0.0
    link_gb_s: float = 50.0
    store_gb: float = 0.0
    store_gb_s: float = 25.0
    store_disk_gb: float = 0.0
    store_disk_gb_s: float = 5.0
    profile: str = "2026"
    labelled_gpu: str = ""
    labelled_batched_tokens: int | None = None
    labelled_num_seqs: int | None = None
    knows_model: bool = True
    labelled_params_b: float | None = None
    labelled_active_b: float | None = None
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    ep_skew: float = 1.0
    ranks: int = 1
    lockstep: bool | None = None
    rank_choice: RankChoice = RankChoice.GATEWAY

    @property
    def shape(self) -> Llm:
        """Return the shape of the groups' model.

        Raises ValueError, with a list of the known models, if the model is unknown.
        """
        return msgspec.structs.replace(model_named(self.model), kv_bytes=self.kv_scalar_bytes)

    @property
    def hardware(self) -> Gpu:
        """Return the GPU type of the groups.

        Raises ValueError, with a list of the known types, if the type is unknown.
        """
        return gpu_named(self.gpu)

    @property
    def software(self) -> Profile:
        """Return the profile (generation) of the groups' engine software.

        Raises ValueError, with a list of the known profiles, if it is unknown.
        """
        return profile_named(self.profile)

    @property
    def capacity_tokens(self) -> int:
        """Return the KV capacity in tokens of a group, or of one of its addressable ranks."""
        if self.kv_tokens is not None:
            return self.kv_tokens
        tokens = check_memory(self.shape, self.hardware, self.layout, Demand(1)).tokens
        return tokens // self.ranks if self.shares_experts else tokens

    @property
    def step_budget(self) -> int:
        """Return the maximum prompt tokens of one engine step, over all stages and ranks of the
        layout.
        """
        return self.max_num_batched_tokens * self.pp * self.dp

    def roofline(self) -> StepTimes:
        """Return the step times of a group, or of a rank whose fellow ranks have equal work."""
        alone = msgspec.structs.replace(self.layout, dp=self.dp)
        budget = self.max_num_batched_tokens
        return step_times_for(self.shape, self.hardware, alone, self.software, budget, self.ep_skew)

    def times(self) -> LockstepTimes:
        """Return the step times of one rank; with lockstep, of the ranks that step together."""
        if not self.shares_experts or not self.is_lockstep:
            return SlowestRank(self.roofline())
        budget = self.max_num_batched_tokens
        return shared_experts_for(
            self.shape, self.hardware, self.layout, self.software, budget, self.ep_skew
        )


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replayed fleet: its groups, and when requests are split between prefill and decode groups.

    kinds           the kinds of groups
    block_tokens    tokens per KV block; blocks of traces are merged or divided to this size
    split           when to split a request
    pairs           whether groups that serve both roles may also split requests
    caches_answers  whether the blocks of answers stay in the prefix cache until they are evicted,
                    as in engines. No recorded prompt continues them: they only use memory
    pulls           whether a group may pull the cached beginning of a prompt from another one
    ideal_cache     whether what any group has computed is in the caches of all groups at once: a
                    bound for the prefill that stores and pulls can save
    """

    name: str
    kinds: tuple[GroupKind, ...]
    block_tokens: int = BLOCK_TOKENS
    split: SplitRule = SplitRule()
    pairs: bool = False
    caches_answers: bool = False
    pulls: bool = False
    ideal_cache: bool = False

    @property
    def groups(self) -> tuple[GroupKind, ...]:
        """Return the groups of the fleet one by one, each as a GroupKind with a count of 1."""
        return tuple(
            msgspec.structs.replace(kind, count=1) for kind in self.kinds for _ in range(kind.count)
        )


def validate(spec: FleetSpec) -> FleetSpec:
    """Return this fleet unchanged if it is valid. Raises FleetError otherwise."""
    if not spec.kinds:
        raise FleetError(f"fleet {spec.name}: a fleet needs at least one group")
    if spec.block_tokens < 1:
        raise FleetError(
            f"fleet {spec.name}: block_tokens must be positive, not {spec.block_tokens}"
        )
    for index, kind in enumerate(spec.kinds):
        try:
            _check(kind, spec.block_tokens)
        except ValueError as error:
            raise FleetError(f"fleet {spec.name}: kinds[{index}]: {error}") from None
    if sum(kind.count for kind in spec.kinds) > MOST_GROUPS:
        raise FleetError(
            f"fleet {spec.name}: a fleet may have at most {MOST_GROUPS} groups of engines"
        )
    if any(kind.rank_choice is not RankChoice.GATEWAY for kind in spec.kinds) and (
        spec.pulls or any(kind.store_gb for kind in spec.kinds)
    ):
        raise FleetError(
            f"fleet {spec.name}: stores and pulls require groups whose ranks the gateway chooses"
        )
    roles = {kind.role for kind in spec.kinds}
    if Role.BOTH not in roles and len(roles) < 2:
        raise FleetError(
            f"fleet {spec.name}: groups with the role {roles.pop()} need groups with the other role"
        )
    return spec


def _check(kind: GroupKind, block_tokens: int) -> None:
    # Raise ValueError if a kind of group is invalid.
    positive = (
        "tp",
        "count",
        "kv_scalar_bytes",
        "max_num_seqs",
        "max_concurrency",
        "slowness",
        "link_gb_s",
        "store_gb_s",
        "store_disk_gb_s",
        *("pp", "ep", "dp", "cp", "ranks"),
    )
    for name in positive:
        if not 0 < getattr(kind, name) < inf:
            raise ValueError(f"{name} must be positive, not {getattr(kind, name)}")
    for name in ("store_gb", "store_disk_gb"):
        if not 0 <= getattr(kind, name) < inf:
            raise ValueError(f"{name} must be 0 or more and finite, not {getattr(kind, name)}")
    if not 0 <= kind.up_at_s < inf:
        raise ValueError(
            f"up_at_s must be 0 or more and finite, in seconds of the replay, not {kind.up_at_s}"
        )
    _check_layout(kind)
    _check_ranks(kind)
    if kind.max_num_batched_tokens < kind.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({kind.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({kind.max_num_seqs})"
        )
    # evaluated for their ValueError
    kind.software  # noqa: B018
    gpu_named(kind.labelled_gpu or kind.gpu)
    if kind.labelled_batched_tokens is not None and kind.labelled_batched_tokens < 1:
        raise ValueError(
            f"labelled_batched_tokens must be positive, not {kind.labelled_batched_tokens}"
        )
    if kind.labelled_num_seqs is not None and kind.labelled_num_seqs < 1:
        raise ValueError(f"labelled_num_seqs must be positive, not {kind.labelled_num_seqs}")
    if kind.capacity_tokens < block_tokens:
        raise ValueError(
            f"the model {kind.model} on {kind.tp} x {kind.gpu} leaves no memory for KV"
        )


def _check_layout(kind: GroupKind) -> None:
    # Raise ValueError for a layout of several axes with which engines do not start.
    if not 1 <= kind.ep_skew <= MOST_SKEW:
        raise ValueError(f"ep_skew must be 1 to {MOST_SKEW:g}, not {kind.ep_skew}")
    if kind.layout == Layout(kind.tp):
        return
    planned = PlannedGroup(kind.layout, facts_of(kind.shape), domain=MAX_SIZE)
    for finding in layout_findings(planned):
        if finding.is_error:
            raise ValueError(finding.text)


def _check_ranks(kind: GroupKind) -> None:
    # Raise ValueError for addressable data-parallel ranks that no engine has.
    if kind.ranks == 1:
        return
    if kind.dp > 1:
        raise ValueError(
            "ranks and dp both set the number of data-parallel ranks: use only one of them"
        )
    if kind.role is not Role.BOTH:
        raise ValueError("ranks require groups that serve whole requests (role both)")
    if kind.shares_experts and kind.pp * kind.cp > 1:
        raise ValueError("ranks with shared experts (ep above tp) cannot be combined with pp or cp")


def _f5(prefills: int, decodes: int, link_gb_s: float) -> FleetSpec:
    kind = msgspec.structs.replace(_H100, link_gb_s=link_gb_s)
    halves = (
        msgspec.structs.replace(kind, count=prefills, role=Role.PREFILL),
        msgspec.structs.replace(kind, count=decodes, role=Role.DECODE),
    )
    return FleetSpec(f"F5:{prefills}p{decodes}d@{link_gb_s:g}", halves, split=SplitRule(1))


_H100 = GroupKind("llama-3.1-70b-fp8", "h100", 4, kv_tokens=600_000)
_PRESETS = {
    "F1": (msgspec.structs.replace(_H100, count=8),),
    "F2": (GroupKind("qwen3-32b", "h100", 2, count=8, kv_tokens=307_000),),
    "F3": (
        GroupKind(
            "llama-3.1-70b-fp8", "h200", 4, count=8, kv_tokens=2_600_000, kv_scalar_bytes=1.0
        ),
    ),
    "F4": (
        GroupKind("llama-3.1-70b-fp8", "h100", 8, count=4),
        GroupKind("llama-3.1-70b-fp8", "l40s", 2, count=8),
    ),
    "F6": (msgspec.structs.replace(_H100, count=64),),
}
_SPLIT = re.compile(r"(?i)F5(?::(\d+)p(\d+)d)?(?:@(\d+(?:\.\d+)?))?")


def preset(name: str) -> FleetSpec:
    """Return one of the preset fleets F1 to F6. Raises FleetError if the name is unknown.

    F5 has the form `F5:6p2d@50`: 6 prefill groups, 2 decode groups, and links of 50 GB/s.

    The fleets are taken from published comparisons of routers:

    F1  eight groups that serve a 70B FP8 model on 4 x H100 each
    F2  eight groups that serve Qwen3-32B on 2 x H100 each, as in llm-d's posts
    F3  eight groups with a KV capacity of 2.6 M tokens each, for agents
    F4  groups with different hardware
    F5  the GPUs of F1 as prefill groups and decode groups
    F6  64 groups
    """
    split = _SPLIT.fullmatch(name)
    if split is not None:
        return validate(_f5(int(split[1] or 6), int(split[2] or 2), float(split[3] or 50)))
    kinds = _PRESETS.get(name.upper())
    if kinds is None:
        raise FleetError(
            f"unknown fleet {name!r}; known fleets: {', '.join(sorted(_PRESETS))} and "
            "F5:<x>p<y>d@<GB/s>"
        )
    return FleetSpec(name.upper(), kinds)


def read_fleet(path: Path) -> FleetSpec:
    """Return the fleet described in a YAML or JSON file.

    Raises FleetError, with the place in the file, if it is invalid.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        plain = YAML(typ="safe", pure=True).load(path.read_text())
        return validate(msgspec.convert({"name": path.stem, **(plain or {})}, FleetSpec))
    except (YAMLError, TypeError, OSError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise FleetError(f"{path}: {error}") from None
