"""Converts a gateway's configuration to the input of a replay: one case per pool.

A case has the mock engines that represent the pool's endpoints, its policy and its admission. The
gateway itself reads and checks configurations. The input is its dump as plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from planner.replay.fleet_spec import FleetError, FleetSpec, GroupKind, validate
from planner.replay.replay_options import ReplayOptions
from planner.text_generator import BYTES_PER_TOKEN
from policies import admission_registry, policy_registry
from policies.admission.admission_policy import Admission, WaitQueueLimits
from policies.admission.fairness import FairShares
from policies.policy_types import Policy
from policies.pricing.split_decision import SplitRule
from policies.routing_types import SLOTS_LABEL, STEP_LABEL, Role, Slo
from policies.sizing.gpus import GPUS
from policies.sizing.model_shapes import MODELS

GPU, MODEL = "h100", "llama-3.1-8b"
KV_BLOCK_TOKENS = 64
"""Tokens per block of the simulated KV caches.

Engines have blocks of 16. Larger ones take a third less time to replay, and the rounding of a
request to whole blocks is small beside its tokens.
"""
LIMIT_LABELS = (SLOTS_LABEL, STEP_LABEL)
"""Labels of an endpoint that state these options of vLLM, or their equivalents."""


class PoolCaseError(ValueError):
    """Raised if a configuration cannot be replayed. The message contains the reason."""


class Assumptions(msgspec.Struct, frozen=True):
    """What to assume about engines if a configuration does not say it. None: use the default.

    model  name of the model
    gpu    GPU type
    """

    model: str | None = None
    gpu: str | None = None


class _Named(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Layout(msgspec.Struct):
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1


class _Endpoint(msgspec.Struct):
    role: Role = Role.BOTH
    layout: _Layout = msgspec.field(default_factory=_Layout)
    labels: dict[str, str] = {}
    max_concurrency: int = 24
    kv_tokens: int | None = None


class _WaitingRoom(msgspec.Struct):
    size: int
    timeout: float


class _Pool(msgspec.Struct):
    policy: _Named
    admission: _Named
    waiting_room: _WaitingRoom
    endpoints: list[_Endpoint] = []


class _Split(msgspec.Struct):
    threshold_tokens: int
    hysteresis: float


class _Model(msgspec.Struct):
    name: str
    pool: str
    parameters: float | None = None
    active_parameters: float | None = None
    split: _Split | None = None


class _Class(msgspec.Struct):
    ttft: float
    tpot: float
    weight: float = 1.0


class _Slos(msgspec.Struct):
    default: str
    classes: dict[str, _Class]


class _Tenant(msgspec.Struct):
    name: str
    weight: float = 1.0


class _Health(msgspec.Struct):
    slow_start: float = 0.0
    slow_factor: float = 0.0


class _Retries(msgspec.Struct):
    hedge: float = 0.0


class _Prefix(msgspec.Struct):
    block_bytes: int = 512


class _Config(msgspec.Struct):
    pools: dict[str, _Pool]
    slo: _Slos
    prefix: _Prefix = msgspec.field(default_factory=_Prefix)
    models: list[_Model] = []
    tenants: list[_Tenant] = []
    health: _Health = msgspec.field(default_factory=_Health)
    retries: _Retries = msgspec.field(default_factory=_Retries)


class PoolCase(msgspec.Struct, frozen=True):
    """One pool of a gateway's configuration, converted to what a replay of its traffic needs.

    models            names of the models that it serves; None: all, because the configuration has
                      none
    fleet             the mock engines that represent its endpoints
    policy_name       name of the routing policy
    policy_params     its parameters
    admission_name    name of the admission policy
    admission_params  its parameters
    limits            limits of the wait queue
    shares            parameters by which tenants share the pool
    classes           service classes by name
    standard          the service class of requests that name none
    assumed           texts about what was assumed because the configuration does not contain it
    slow_start_s      setting of slow start, see ReplayOptions
    slow_factor       setting of the ejection of slow endpoints, see ReplayOptions
    hedge_share       setting of hedges, see ReplayOptions
    index_tokens      tokens per block of the prefix index
    """

    pool: str
    models: tuple[str, ...] | None
    fleet: FleetSpec
    policy_name: str
    policy_params: Mapping[str, Any]
    admission_name: str
    admission_params: Mapping[str, Any]
    limits: WaitQueueLimits
    shares: FairShares
    classes: Mapping[str, Slo]
    standard: Slo
    assumed: tuple[str, ...]
    slow_start_s: float = 0.0
    slow_factor: float = 0.0
    hedge_share: float = 0.0
    index_tokens: int | None = None

    def options(self, seed: int = 0) -> ReplayOptions:
        """Return settings with which a replay behaves like a gateway with this configuration.

        It learns the lengths of answers, and ejects slow endpoints as configured.

        seed  random seed of the replay
        """
        return ReplayOptions(
            seed,
            learns_lengths=True,
            always_predicts=False,
            standard=self.standard,
            classes=self.classes,
            slow_start_s=self.slow_start_s,
            slow_factor=self.slow_factor,
            hedge_share=self.hedge_share,
            index_tokens=self.index_tokens,
        )

    def policy(self) -> Policy:
        """Return a new routing policy for the pool.

        Each replay needs its own, because policies learn.
        """
        return policy_registry.build(self.policy_name, self.policy_params)

    def admission(self) -> Admission:
        """Return a new admission policy for the pool. If it has tenant weights, they are set."""
        takes_weights = (
            "weights" in admission_registry.params_type(self.admission_name).__struct_fields__
            and self.shares.weights
        )
        params = (
            {"weights": self.shares.weights, **self.admission_params}
            if takes_weights
            else self.admission_params
        )
        return admission_registry.build_admission(self.admission_name, params)


def cases(config: Mapping[str, Any], taken: Assumptions | None = None) -> dict[str, PoolCase]:
    """Return every pool of a configuration as the input of a replay, by name.

    `config` is the gateway's dump, with durations in seconds. Raises PoolCaseError if a pool cannot
    be replayed.
    """
    try:
        read = msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        hint = "a running gateway does not show values by reference: give its file with --running"
        text = f"{error}; {hint}"
        raise PoolCaseError(text) from None
    return {name: _case(name, read, taken or Assumptions()) for name in read.pools}


def _case(name: str, config: _Config, taken: Assumptions) -> PoolCase:
    pool = config.pools[name]
    models = [model for model in config.models if model.pool == name]
    assumed: list[str] = []
    kinds = _kinds(pool, models, taken, assumed)
    split = next((model.split for model in models if model.split is not None), None)
    rule = SplitRule() if split is None else SplitRule(split.threshold_tokens, split.hysteresis)
    try:
        fleet = validate(
            FleetSpec(name, tuple(kinds), KV_BLOCK_TOKENS, rule, split is not None, True)
        )
    except FleetError as error:
        raise PoolCaseError(f"pool {error}") from None
    classes = {
        name_: Slo(name_, class_.ttft, class_.tpot, class_.weight)
        for name_, class_ in config.slo.classes.items()
    }
    return PoolCase(
        pool=name,
        models=tuple(model.name for model in models) if config.models else None,
        fleet=fleet,
        policy_name=pool.policy.name,
        policy_params=pool.policy.parameters,
        admission_name=pool.admission.name,
        admission_params=pool.admission.parameters,
        limits=WaitQueueLimits(pool.waiting_room.size, pool.waiting_room.timeout),
        shares=FairShares({tenant.name: tenant.weight for tenant in config.tenants}),
        classes=classes,
        standard=classes[config.slo.default],
        assumed=tuple(dict.fromkeys(assumed)),
        slow_start_s=config.health.slow_start,
        slow_factor=config.health.slow_factor,
        hedge_share=config.retries.hedge,
        index_tokens=max(1, config.prefix.block_bytes // BYTES_PER_TOKEN),
    )


def _kinds(
    pool: _Pool, models: Sequence[_Model], taken: Assumptions, assumed: list[str]
) -> list[GroupKind]:
    splitting = any(model.split is not None for model in models)
    if not pool.endpoints:
        raise PoolCaseError("a pool without endpoints cannot be replayed")
    model, is_exact = _model(models, taken, assumed)
    return [
        msgspec.structs.replace(
            GroupKind(
                model,
                _gpu(endpoint, taken, assumed),
                role=endpoint.role,
                kv_tokens=endpoint.kv_tokens,
                max_concurrency=endpoint.max_concurrency,
            ),
            **_sizes(endpoint.layout, is_exact=is_exact),
            **_limits(endpoint.labels),
            **_knowledge(endpoint, models),
        )
        for endpoint in pool.endpoints
        if splitting or endpoint.role is not Role.PREFILL
    ]


def _sizes(layout: _Layout, *, is_exact: bool) -> dict[str, int]:
    # Return the sizes of the layout. For an assumed model, which may not be divisible like the real
    # one, they are those of plain tensor parallelism.
    return msgspec.structs.asdict(layout) if is_exact else {"tp": layout.tp * layout.pp}


def _limits(labels: Mapping[str, str]) -> dict[str, int]:
    # Return the limits of an engine's steps that the labels state, and what the gateway knows from
    # them. The configuration was checked: they are positive numbers.
    limits = {name: int(labels[name]) for name in LIMIT_LABELS if name in labels}
    if SLOTS_LABEL in limits:
        limits["labelled_num_seqs"] = limits[SLOTS_LABEL]
    if STEP_LABEL in limits:
        limits["labelled_batched_tokens"] = limits[STEP_LABEL]
    return limits


def _knowledge(endpoint: _Endpoint, models: Sequence[_Model]) -> dict[str, Any]:
    # Return what the gateway knows of an endpoint's speed at first, see fleet.prior_belief().
    gpu = endpoint.labels.get("gpu", "").lower()
    known = gpu if gpu in GPUS else GPU
    sized = max(models, key=lambda model: model.parameters or 0.0, default=None)
    return {
        "knows_model": False,
        "labelled_gpu": known if gpu else "",
        "labelled_params_b": None if sized is None else sized.parameters,
        "labelled_active_b": None if sized is None else sized.active_parameters,
    }


def _model(models: Sequence[_Model], taken: Assumptions, assumed: list[str]) -> tuple[str, bool]:
    # Return the model of mock groups, and whether it is the real one.
    #
    # A model of another name is represented by the known one of the nearest number of parameters.
    # Raises PoolCaseError if the model in `taken` is unknown.
    if taken.model is not None:
        if taken.model.lower() not in MODELS:
            raise PoolCaseError(f"unknown model {taken.model!r}; known models: {', '.join(MODELS)}")
        return taken.model, True
    named = next((model.name for model in models if model.name.lower() in MODELS), None)
    if named is not None:
        return named, True
    parameters_b = max((model.parameters or 0.0 for model in models), default=0.0)
    if not parameters_b:
        assumed.append(
            f"groups serve {MODEL}: no model declares its parameters, and --model was not given"
        )
        return MODEL, False
    nearest = min(
        MODELS, key=lambda name: (abs(MODELS[name].params / 1e9 - parameters_b), len(name))
    )
    assumed.append(f"groups serve {nearest}, the nearest known to {parameters_b:g}B parameters")
    return nearest, False


def _gpu(endpoint: _Endpoint, taken: Assumptions, assumed: list[str]) -> str:
    label = (taken.gpu or endpoint.labels.get("gpu") or "").lower()
    if label in GPUS:
        return label
    if taken.gpu is not None:
        raise PoolCaseError(f"unknown GPU {taken.gpu!r}; known GPUs: {', '.join(GPUS)}")
    assumed.append(f"groups run on {GPU}: endpoints have no gpu label, and --gpu was not given")
    return GPU
