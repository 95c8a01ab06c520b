"""The sizing recipe: eight steps (gates) from a model to a number of replicas, each with a reason.

Each gate uses the decisions of the gates before it. It records its question, numbers and answer,
and the source that it follows (a "seed", listed in docs/sizing.md). Gates are in layout_gates.py
and replica_gates.py. pareto_front.py compares all layouts, and show.py prints.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mockgpu.timing.step_time_grids import Grid
from planner.size import layout_gates, replica_gates
from planner.size.plan_draft import Draft, FleetPlan, PlanHardware, RecipeGate, SizingError
from planner.size.workload import Workload
from policies.sizing.layout_facts import facts_of
from policies.sizing.model_shapes import MODELS, Llm, fp8
from policies.sizing.parallelism_rules import valid_tp_sizes

__all__ = ["FleetPlan", "PlanHardware", "RecipeGate", "SizingError", "plan_fleet", "variants"]


def variants(model: Llm, quant: str) -> list[Llm]:
    """Return the versions of a model to compare: own weights, one-byte weights, or both.

    quant  auto, bf16 or fp8

    A model with quantised weights has only one version. Raises SizingError if bf16 is requested for
    it.
    """
    if model.weight_bytes < 2:
        if quant == "bf16":
            raise SizingError(
                f"--quant bf16 is impossible: the weights of {model.name} are quantised already; "
                "valid: auto, fp8"
            )
        return [model]
    named = MODELS.get(f"{model.name}-fp8".lower())
    small = named or fp8(model, f"{model.name} (fp8)")
    if model.embedding_params and named is None:
        kept = 2 * model.embedding_params + model.replicated_params
        small = msgspec.structs.replace(small, bf16_params=kept)
    return {"bf16": [model], "fp8": [small]}.get(quant, [model, small])


def plan_fleet(
    candidates: Sequence[Llm], hardware: PlanHardware, work: Workload, grids: Sequence[Grid]
) -> FleetPlan:
    """Return the plan for the candidate (version of the model) that needs the fewest GPUs.

    Raises SizingError if no candidate fits the GPUs.
    """
    plans: list[FleetPlan] = []
    problems: list[str] = []
    for model in candidates:
        try:
            plans.append(_plan_with_note(model, hardware, work, grids))
        except SizingError as error:
            problems.append(str(error))
    if not plans:
        raise SizingError(problems[-1])
    best = min(plans, key=lambda plan: (len(plan.shortfalls), plan.gpus))
    first = layout_gates.quantise(candidates, plans, problems, best)
    return msgspec.structs.replace(best, gates=(first, *best.gates))


def _plan_with_note(
    model: Llm, hardware: PlanHardware, work: Workload, grids: Sequence[Grid]
) -> FleetPlan:
    # Return the plan with the least TP size, and a note if a larger TP size needs fewer GPUs in
    # total. That is so if the weights leave memory for only a few requests at the least size.
    least = _plan(model, hardware, work, grids)
    limit = min(hardware.domain, hardware.gpus or hardware.domain, least.gpus - 1)
    wider = [
        _plan(model, msgspec.structs.replace(hardware, smallest_tp=tp), work, grids)
        for tp in valid_tp_sizes(facts_of(model), limit)
        if tp > least.layout.gpus
    ]
    best = min((least, *wider), key=lambda plan: (len(plan.shortfalls), plan.gpus))
    if best.gpus >= least.gpus:
        return least
    note = (
        f"--tp {best.layout.tp} needs fewer GPUs, {best.gpus} instead of {least.gpus}: a replica "
        f"takes {best.ceiling} requests at once instead of {least.ceiling}. Seeds 001 and 002 take "
        "the least TP, 003 a larger one where KV is short"
    )
    explained = (
        msgspec.structs.replace(gate, notes=(note, *gate.notes)) if gate.number == 8 else gate
        for gate in least.gates
    )
    return msgspec.structs.replace(least, gates=tuple(explained))


def _plan(model: Llm, hardware: PlanHardware, work: Workload, grids: Sequence[Grid]) -> FleetPlan:
    draft = Draft(model, hardware, work, grids)
    for gate in (
        layout_gates.fits_one,
        layout_gates.least_tp,
        layout_gates.raise_tp,
        layout_gates.least_pp,
        layout_gates.most_ep,
        layout_gates.split_context,
        replica_gates.count_replicas,
        replica_gates.split_phases,
    ):
        gate(draft)
    return draft.finish()
