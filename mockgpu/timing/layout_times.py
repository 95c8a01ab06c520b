"""Step times of engines that use pipeline, expert, data or context parallelism as well as TP.

roofline.py computes the step of one TP group. This module adds the effects of the other axes:

- pipeline stages (PP): micro-batches, and idle time while the pipeline fills
- data parallelism (DP): the part of a batch that one rank computes
- experts (EP): the exchange of tokens, and the load of the busiest rank

Memory is computed in policies/sizing/gpu_memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from mockgpu.timing.roofline import PROFILES, Profile, Roofline, StepTimeParts, StepTimes, StepWork
from mockgpu.timing.step_time_grids import Grid, roofline_for
from policies.sizing.gpus import Gpu
from policies.sizing.model_shapes import Llm
from policies.sizing.parallel_layout import Layout

# A send and a receive between GPUs of neighbouring stages (aiconfigurator's p2p latency).
HOP_S = 10e-6
# Bytes per scalar sent to experts (fp8) and back (bf16), as DeepEP sends them.
DISPATCH_BYTES, COMBINE_BYTES = 1, 2


def rank_model(model: Llm, layout: Layout) -> Llm:
    """Return the model with only the weights that one group of `tp` GPUs reads in a step.

    If the experts are spread over more ranks (EP) than TP has, the TP group reads only some of
    them. The result then has no measured step times, because measurements are of the whole model.
    """
    if layout.ep <= layout.tp:
        return model
    experts = model.expert_params * layout.tp / layout.ep
    params = model.params - model.expert_params + experts
    active = min(params, model.active_params)
    return msgspec.structs.replace(
        model, params=params, active_params=active, expert_params=experts, grid_name=""
    )


def travel_s(model: Llm, gpu: Gpu, layout: Layout, tokens: float, skew: float = 1.0) -> float:
    """Return the seconds that a step's tokens travel between pipeline stages and to experts.

    tokens  number of tokens in the step
    skew    load of the busiest expert rank divided by the mean load of all expert ranks
    """
    seconds = (layout.pp - 1) * (HOP_S + tokens * model.activation_bytes / gpu.nic_bytes_s)
    ranks = layout.ep
    if ranks > 1:
        scalars = tokens / layout.tp * model.experts_per_token * model.width
        sent = scalars * (DISPATCH_BYTES + COMBINE_BYTES) * (ranks - 1) / ranks * skew
        speed = gpu.link_bytes_s * gpu.fit.link_eff
        latency = 2 * gpu.fit.allreduce_us * 1e-6
        seconds += model.moe_layers * (latency + sent / speed)
    return seconds


class LayoutTimes:
    """Computes the step times of one engine whose layout uses more than tensor parallelism.

    A step advances every decoding sequence by one token. The sequences are divided over the
    data-parallel ranks and over the micro-batches of the pipeline. A prompt fills micro-batches of
    `budget_tokens` tokens. While sequences decode, the pipeline stays full. A step without decoding
    also pays for filling the pipeline: pp - 1 times the duration of one stage.
    """

    def __init__(
        self, line: Roofline, model: Llm, gpu: Gpu, layout: Layout, budget_tokens: int, skew: float
    ) -> None:
        self._line, self._model, self._gpu, self._layout = line, model, gpu, layout
        self._budget_tokens, self._skew = budget_tokens, skew
        self._lanes = layout.pp * layout.dp
        dense = model.params - model.expert_params
        self.expert_share = max(0.0, 1 - dense / model.active_params)
        read_s = layout.tp * gpu.hbm_bytes_s * gpu.fit.weights_eff
        self.dense_weights_s = dense * model.param_bytes / read_s

    def step_s(self, work: StepWork) -> float:
        pp, prefills = self._layout.pp, self._micro_batches(work.prefill_tokens)
        decodes = self._lane_decodes(work)
        decode_s = self._lane_s(decodes) if decodes.decode_seqs else 0.0
        if not prefills:
            return decode_s
        share = 1 / prefills
        # Micro-batches of prompts beyond the first of each stage are on other ranks of DP.
        rounds = min(pp, prefills)
        prefill_s = self._lane_s(
            StepWork(
                round(work.prefill_tokens * share),
                work.attention_area * share,
                decodes.decode_seqs,
                decodes.decode_context,
            )
        )
        if not decodes.decode_seqs:
            return prefill_s * (rounds + pp - 1) / pp
        return max(prefill_s, (rounds * prefill_s + (pp - rounds) * decode_s) / pp)

    def _micro_batches(self, tokens: int) -> int:
        return min(self._lanes, -(-tokens // self._budget_tokens))

    def _lane_decodes(self, work: StepWork) -> StepWork:
        if not work.decode_seqs:
            return StepWork()
        seqs = -(-work.decode_seqs // self._lanes)
        return StepWork(0, 0.0, seqs, round(work.decode_context * seqs / work.decode_seqs))

    def _lane_s(self, work: StepWork) -> float:
        seconds, cp = self._line.step_s(work), self._layout.cp
        if cp > 1 and work.prefill_tokens:
            decodes = work._replace(prefill_tokens=0, attention_area=0.0)
            alone_s = self._line.step_s(decodes) if work.decode_seqs else 0.0
            seconds = alone_s + (seconds - alone_s) / cp
        tokens = work.prefill_tokens + work.decode_seqs
        if self._skew > 1 and self._model.experts:
            seconds += (self._skew - 1) * self.experts_s(self._line.terms(work))
        return seconds + travel_s(self._model, self._gpu, self._layout, tokens, self._skew)

    def experts_s(self, parts: StepTimeParts) -> float:
        """Return the seconds in which one rank computes its experts in a step.

        `parts` are the parts of the whole step's duration.
        """
        if parts.flops_s >= parts.weights_s:
            return parts.flops_s * self.expert_share
        return max(0.0, parts.weights_s - self.dense_weights_s)


class LockstepTimes(Protocol):
    """The interface to the durations of steps that data-parallel ranks begin and end together."""

    def step_s(self, works: Sequence[StepWork]) -> float:
        """Return the duration in seconds of one joint step.

        `works` has the work of each rank, in rank order. A rank without requests has an empty
        StepWork, and computes a dummy batch.
        """
        ...


class SlowestRank:
    """Step durations of ranks that share nothing: a step takes as long as the slowest rank."""

    def __init__(self, rank: StepTimes) -> None:
        self._rank = rank

    def step_s(self, works: Sequence[StepWork]) -> float:
        if len(works) == 1:
            return self._rank.step_s(works[0])
        return max(
            self._rank.step_s(work) for work in works if work.prefill_tokens or work.decode_seqs
        )


class SharedExperts:
    """Step durations of data-parallel ranks that share the experts of a mixture-of-experts model.

    In every layer, the experts wait for the tokens of all ranks. So attention and dense layers take
    as long as on the slowest rank. An expert rank computes the mean of all ranks' tokens; the
    busiest one computes `skew` times the mean. If all ranks have equal work, the result equals that
    of LayoutTimes.
    """

    def __init__(
        self, line: Roofline, model: Llm, gpu: Gpu, layout: Layout, budget_tokens: int, skew: float
    ) -> None:
        self._line, self._model, self._gpu = line, model, gpu
        self._layout, self._skew = msgspec.structs.replace(layout, dp=1), skew
        self._alone = LayoutTimes(line, model, gpu, self._layout, budget_tokens, skew)

    def step_s(self, works: Sequence[StepWork]) -> float:
        tokens = [work.prefill_tokens + work.decode_seqs for work in works]
        mean = sum(tokens) / len(works)
        experts, share = self._mean_terms(mean), self._alone.expert_share
        weights_s, experts_s = experts.weights_s, experts.flops_s * share
        slowest_s = 0.0
        for work in works:
            parts = self._line.terms(work)
            own_s = max(weights_s, parts.flops_s * (1 - share) + experts_s) + sum(parts[2:])
            slowest_s = max(slowest_s, own_s)
        if self._skew > 1:
            slowest_s += (self._skew - 1) * self._alone.experts_s(experts)
        # The rank with the most tokens sends them all, the busiest expert rank receives its load.
        busiest = max(*tokens, mean * self._skew)
        return slowest_s + travel_s(self._model, self._gpu, self._layout, busiest)

    def _mean_terms(self, tokens: float) -> StepTimeParts:
        # Return the parts of the duration of a step with this mean number of tokens per rank.
        #
        # Below one token, the dense weights are read nevertheless, and fewer experts.
        parts = self._line.terms(StepWork(0, 0.0, max(1.0, tokens), 0.0))
        if tokens >= 1:
            return parts
        dense_s = self._alone.dense_weights_s
        read_s = dense_s + tokens * (parts.weights_s - dense_s)
        return parts._replace(weights_s=read_s, flops_s=tokens * parts.flops_s)


def step_times_for(
    model: Llm,
    gpu: Gpu,
    layout: Layout,
    profile: Profile = PROFILES["2026"],
    budget_tokens: int = 8192,
    skew: float = 1.0,
    grids: Sequence[Grid] | None = None,
) -> Roofline | LayoutTimes:
    """Return the object that computes an engine's step durations, for any parallel layout.

    profile        generation of engine software, with its overheads
    budget_tokens  prompt tokens of one micro-batch (vLLM's max_num_batched_tokens)
    skew           load of the busiest expert rank divided by the mean load, at least 1
    grids          measured step times
    """
    ranks = rank_model(model, layout)
    line = roofline_for(ranks, gpu, layout.tp, profile, grids)
    if layout == Layout(layout.tp) and (skew == 1 or not model.experts):
        return line
    return LayoutTimes(line, ranks, gpu, layout, budget_tokens, skew)


def shared_experts_for(
    model: Llm,
    gpu: Gpu,
    layout: Layout,
    profile: Profile = PROFILES["2026"],
    budget_tokens: int = 8192,
    skew: float = 1.0,
) -> SharedExperts:
    """Return the object that computes the step durations of ranks which share their experts.

    budget_tokens  prompt tokens of one micro-batch (vLLM's max_num_batched_tokens)
    skew           load of the busiest expert rank divided by the mean load, at least 1
    """
    ranks = rank_model(model, layout)
    line = roofline_for(ranks, gpu, layout.tp, profile)
    return SharedExperts(line, ranks, gpu, layout, budget_tokens, skew)
