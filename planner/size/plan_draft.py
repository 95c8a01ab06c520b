"""Types of a sizing plan: a draft with the decisions made so far, and the finished plan."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mockgpu.timing.step_time_grids import Grid
from planner.size.replica_times import BatchTimes, ReplicaTimes, at_batch
from planner.size.workload import Workload
from policies.sizing.gpu_memory import Demand, MemoryCheck, check_memory
from policies.sizing.gpus import Gpu
from policies.sizing.layout_facts import ModelFacts, facts_of
from policies.sizing.model_shapes import Llm
from policies.sizing.parallel_layout import Layout
from policies.sizing.parallelism_rules import (
    LayoutFinding,
    PlannedGroup,
    layout_findings,
    valid_tp_sizes,
)
from policies.sizing.token_cost import TokenPrices, token_prices, usd_of


class SizingError(ValueError):
    """Raised if no sizing plan can be computed. The message contains the valid values."""


class RecipeGate(msgspec.Struct, frozen=True):
    """One decision (gate) of the sizing recipe, with its reason.

    number    its number in the recipe
    question  what is decided
    numbers   the figures that the decision is based on, one text each
    answer    the decision
    source    the document or measurement that the step follows
    notes     remarks
    """

    number: int
    question: str
    numbers: tuple[str, ...]
    answer: str
    source: str
    notes: tuple[str, ...] = ()


class PlanHardware(msgspec.Struct, frozen=True):
    """The GPUs to plan a fleet for.

    gpu             GPU type
    domain          number of GPUs that fast links connect
    gpus            number of available GPUs; None: as many as needed
    price_hour      price of one GPU in dollars per hour
    is_best_effort  what to do if no TP size keeps a promised latency. True: raise TP as long as
                    that makes decoding faster
    smallest_tp     TP sizes below this one are not considered
    """

    gpu: Gpu
    domain: int
    gpus: int | None = None
    price_hour: float = 2.5
    is_best_effort: bool = False
    smallest_tp: int = 1


class FleetPlan(msgspec.Struct, frozen=True):
    """A planned fleet of equal replicas (engines).

    model        shape of the model
    hardware     the GPUs
    work         the traffic and the promised latencies
    layout       parallel sizes of a replica
    memory       the memory check of a replica
    single       times of a replica with one request
    loaded       times of a replica with `ceiling` requests
    ceiling      number of requests that one replica serves at once
    replicas     number of replicas
    wait_s       wait before a prefill, in seconds, that the promised percentile of requests stays
                 within
    gates        the steps of the recipe with their reasons
    shortfalls   what the plan does not achieve, one sentence each
    findings     layout rules that the plan violates
    is_measured  whether the step times were measured for this model, GPU and layout
    """

    model: Llm
    hardware: PlanHardware
    work: Workload
    layout: Layout
    memory: MemoryCheck
    single: BatchTimes
    loaded: BatchTimes
    ceiling: int
    replicas: int
    wait_s: float
    gates: tuple[RecipeGate, ...]
    shortfalls: tuple[str, ...]
    findings: tuple[LayoutFinding, ...]
    is_measured: bool

    @property
    def gpus(self) -> int:
        return self.layout.gpus * self.replicas

    @property
    def usd_hour(self) -> float:
        """Return the cost of all GPUs of the planned fleet, in dollars per hour."""
        return usd_of(self.hardware.price_hour, self.gpus, 3600.0)

    @property
    def prices(self) -> TokenPrices:
        """Return the dollars per million tokens while every replica serves `ceiling` requests."""
        return token_prices(self.loaded.seconds, self.hardware.price_hour, self.layout.gpus)


class Draft:
    """A sizing plan that is being made: the decisions so far.

    The steps (gates) of the sizing recipe read it and add to it, one after another. `finish`
    returns the plan.
    """

    def __init__(
        self, model: Llm, hardware: PlanHardware, work: Workload, grids: Sequence[Grid]
    ) -> None:
        self.model, self.hardware, self.work, self.grids = model, hardware, work, grids
        self.facts: ModelFacts = facts_of(model)
        limit = min(hardware.domain, hardware.gpus or hardware.domain)
        sizes = valid_tp_sizes(self.facts, limit)
        if (smallest := hardware.smallest_tp) > 1 and smallest not in sizes:
            valid = ", ".join(map(str, sizes))
            raise SizingError(
                f"--tp {smallest} is impossible for {model.name}; valid TP sizes: {valid}"
            )
        self.tp_sizes = [tp for tp in sizes if tp >= smallest]
        self.demand = Demand(work.context, work.max_concurrency or 1, work.headroom)
        self.layout = Layout()
        self.least_tp = 1
        self.ceiling, self.replicas, self.wait_s = 1, 1, 0.0
        self.gates: list[RecipeGate] = []
        self.shortfalls: list[str] = []
        self._times: dict[Layout, ReplicaTimes] = {}

    def memory(self, layout: Layout | None = None) -> MemoryCheck:
        """Return the GPU memory check of a layout; by default, of the layout decided so far."""
        return check_memory(self.model, self.hardware.gpu, layout or self.layout, self.demand)

    def times(self, layout: Layout | None = None) -> ReplicaTimes:
        """Return the step times of a layout in seconds; by default, of the layout decided so
        far.
        """
        layout = layout or self.layout
        if layout not in self._times:
            self._times[layout] = ReplicaTimes(self.model, self.hardware.gpu, layout, self.grids)
        return self._times[layout]

    def add(
        self, question: str, numbers: Sequence[str], answer: str, source: str, *notes: str
    ) -> None:
        """Record one decision (gate) of a sizing plan, with its reason.

        The arguments are the fields of RecipeGate. Gates are numbered from 2 on, because gate 1
        compares finished plans.
        """
        number = len(self.gates) + 2
        self.gates.append(RecipeGate(number, question, tuple(numbers), answer, source, notes))

    def finish(self) -> FleetPlan:
        """Check the layout against all rules, and return the finished sizing plan."""
        hardware, memory, times = self.hardware, self.memory(), self.times()
        group = self._group(memory)
        return FleetPlan(
            model=self.model,
            hardware=hardware,
            work=self.work,
            layout=self.layout,
            memory=memory,
            single=at_batch(times, self.work, 1),
            loaded=at_batch(times, self.work, self.ceiling),
            ceiling=self.ceiling,
            replicas=self.replicas,
            wait_s=self.wait_s,
            gates=tuple(self.gates),
            shortfalls=tuple(self.shortfalls),
            findings=tuple(layout_findings(group)),
            is_measured=times.is_measured,
        )

    def _group(self, memory: MemoryCheck) -> PlannedGroup:
        # A larger TP size than the model needs is no waste if a latency promise requires it.
        least = self.layout.tp if self.work.limits else self.least_tp
        return PlannedGroup(
            self.layout,
            self.facts,
            domain=self.hardware.domain,
            has_fast_link=self.hardware.gpu.has_fast_link,
            gpus=self.hardware.gpus,
            memory=memory,
            max_concurrency=self.work.max_concurrency,
            min_tp=least,
        )
