"""Computes the duration of one engine step from bytes read, operations and collectives.

A roofline model: a step takes as long as its slower part, memory reads or arithmetic. The equation
has eight constants per GPU (policies/sizing/gpus.py) and holds for any model and TP size. Measured
step times, if any, correct it (step_time_grids.py). Scheduling and clocks are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from policies.sizing.gpus import Gpu
from policies.sizing.model_shapes import Llm


class StepWork(NamedTuple):
    """The amount of work in one engine step.

    prefill_tokens   prompt tokens to compute
    attention_area   pairs of a prompt token and an earlier token that it attends to. A chunk of `c`
                     tokens from position `s` on has c x (s + c / 2) pairs
    decode_seqs      sequences that generate one token each; a mean over steps may be a fraction
    decode_context   tokens of KV that these sequences read, in total
    """

    prefill_tokens: int = 0
    attention_area: float = 0.0
    decode_seqs: float = 0
    decode_context: float = 0


class Profile(msgspec.Struct, frozen=True):
    """A generation of engine software, with its overheads.

    layer_us   microseconds of overhead per layer; None: the value fitted to the GPU
    fabric_us  extra microseconds per all-reduce in groups of more than `fabric_above_tp` ranks,
               because such groups extend beyond the fast links between GPUs
    exact      whether measured step times may correct the equation
    request_s  seconds that the API server spends on a request before the engine gets it. The
               simulator BLIS uses 15.6 ms
    """

    name: str
    layer_us: float | None = None
    fabric_us: float = 0.0
    fabric_above_tp: int = 8
    exact: bool = True
    request_s: float = 0.0156


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        # Engines of 2026, measured in the grids of step times.
        "2026": Profile("2026"),
        # Splitwise's 2023 stack: about 0.35 ms of launch overhead per layer, so TP 8 gained little
        # over TP 4.
        "2023": Profile("2023", layer_us=350.0, exact=False),
        # Harbor Analytics: a 2023 stack whose TP 8 crossed a slow fabric (see docs/mock.md for the
        # conflict).
        "harbor": Profile(
            "harbor", layer_us=320.0, fabric_us=350.0, fabric_above_tp=4, exact=False
        ),
    }
)


def profile_named(name: str) -> Profile:
    """Return the engine software profile with this name.

    Raises ValueError with a list of the known names if there is none.
    """
    profile = PROFILES.get(name)
    if profile is None:
        raise ValueError(f"unknown profile {name!r}; known profiles: {', '.join(PROFILES)}")
    return profile


class StepTimeParts(NamedTuple):
    """The parts of one step's duration, in seconds.

    `weights_s` (reading weights) and `flops_s` (arithmetic) overlap, so only the larger one counts.
    """

    weights_s: float
    flops_s: float
    kv_s: float
    attention_s: float
    overhead_s: float
    sequences_s: float
    collectives_s: float

    @property
    def total_s(self) -> float:
        """Return the step's duration in seconds: max(weights_s, flops_s) plus all other parts."""
        return max(self.weights_s, self.flops_s) + sum(self[2:])

    @property
    def bound(self) -> str:
        return max(zip(self, self._fields, strict=True))[1].removesuffix("_s")


class Correction(Protocol):
    """The interface to correction factors for step times, each measured time / computed time."""

    def prefill(self, tokens: int) -> float:
        """Return the correction factor for a prefill-only step of `tokens` prompt tokens."""
        ...

    def decode(self, seqs: float, context: float) -> float:
        """Return the correction factor for a decode-only step of `seqs` sequences.

        `context` is the sum of their contexts, in tokens.
        """
        ...


class StepTimes(Protocol):
    """The interface that computes how long an engine's step takes, for any parallel layout."""

    def step_s(self, work: StepWork) -> float: ...


class Roofline:
    """The step-time model of one LLM on `tp` GPUs of one kind.

    The constructor computes the costs per unit of work once, so that each step is cheap.
    """

    def __init__(
        self, model: Llm, gpu: Gpu, tp: int, profile: Profile, correction: Correction | None = None
    ) -> None:
        fit, ranks = gpu.fit, tp
        flops = gpu.flops(model.weight_bytes)
        self._dense = model.active_params >= model.params
        self._idle_share = 1 - model.active_params / model.params
        self._weights_s = model.weights_bytes / (ranks * gpu.hbm_bytes_s * fit.weights_eff)
        self._flop_s = 2 * model.active_params / (ranks * flops * fit.flops_eff)
        self._kv_s = model.kv_rank_bytes(tp) / (gpu.hbm_bytes_s * fit.kv_eff)
        pair_flops = 4 * model.heads * model.head_dim * model.layers
        self._area_s = pair_flops / (ranks * gpu.bf16_flops * fit.attention_eff)
        layer_us = fit.layer_us if profile.layer_us is None else profile.layer_us
        self._layers_s = model.layers * layer_us * 1e-6
        self._sequence_s = fit.sequence_us * 1e-6 * model.layers / 80
        self._collective_s, self._wire_s = 0.0, 0.0
        if tp > 1:
            fabric_us = profile.fabric_us if tp > profile.fabric_above_tp else 0.0
            self._collective_s = model.allreduces * (fit.allreduce_us + fabric_us) * 1e-6
            ring_bytes = 2 * (tp - 1) / tp * model.activation_bytes
            self._wire_s = model.allreduces * ring_bytes / (gpu.link_bytes_s * fit.link_eff)
        self._correction = correction if profile.exact else None

    def terms(self, work: StepWork) -> StepTimeParts:
        """Return the parts of one engine step's duration, in seconds, without corrections.

        The total is max(weights, FLOPs) + KV + attention + overheads + collectives.
        """
        tokens = work.prefill_tokens + work.decode_seqs
        # A mixture of experts reads only the experts that its tokens use: all of them in a large
        # batch.
        read = 1.0 if self._dense else 1 - self._idle_share**tokens
        return StepTimeParts(
            self._weights_s * read,
            self._flop_s * tokens,
            self._kv_s * work.decode_context,
            self._area_s * work.attention_area,
            self._layers_s,
            self._sequence_s * work.decode_seqs,
            self._collective_s + self._wire_s * tokens,
        )

    def equation_s(self, work: StepWork) -> float:
        """Return the duration of one engine step in seconds, without corrections.

        It equals `terms(work).total_s`, but is faster, because a replay calls it for every step.
        """
        tokens = work.prefill_tokens + work.decode_seqs
        read = 1.0 if self._dense else 1 - self._idle_share**tokens
        return (
            max(self._weights_s * read, self._flop_s * tokens)
            + self._kv_s * work.decode_context
            + self._area_s * work.attention_area
            + self._layers_s
            + self._sequence_s * work.decode_seqs
            + self._collective_s
            + self._wire_s * tokens
        )

    def step_s(self, work: StepWork) -> float:
        """Return the duration of one engine step in seconds, corrected by measured step times.

        At a measured point, the result is the measured time. A chunk of a prompt is corrected like
        a whole prompt of that many tokens. A step with prefill and decode gets both factors,
        weighted by the time that each of the two would take alone.
        """
        seconds = self.equation_s(work)
        if self._correction is None:
            return seconds
        if not work.prefill_tokens:
            return seconds * self._correction.decode(work.decode_seqs, work.decode_context)
        prefill = self._correction.prefill(work.prefill_tokens)
        if not work.decode_seqs:
            return seconds * prefill
        decode = self._correction.decode(work.decode_seqs, work.decode_context)
        prefill_s = self.equation_s(work._replace(decode_seqs=0, decode_context=0))
        decode_s = self.equation_s(StepWork(0, 0.0, work.decode_seqs, work.decode_context))
        return seconds * (prefill * prefill_s + decode * decode_s) / (prefill_s + decode_s)
