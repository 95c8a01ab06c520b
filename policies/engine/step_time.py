"""The step times of one engine: estimated from its GPUs and model, with learned correction factors.

- StepCosts is the cost of an engine step by a roofline model.
- `shape_for` estimates it from the GPU type and the parallel layout.
- SpeedBelief corrects it while requests run.

expected_latency.py derives the times of one request. first_token_calibration.py provides the
observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from operator import mul
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from policies.engine.kalman import KalmanFilter
from policies.sizing.gpus import GPUS


class StepCosts(msgspec.Struct, frozen=True):
    """The costs of one engine step, in seconds per unit of work.

        step = max(weights_s, token_s (p + B)) + wire_s (p + B) + pair_s area + context_s C
               + sequence_s B + step_s

    - p: prompt tokens in the step
    - B: decoding sequences in the step
    - C: total context of these sequences in tokens
    - area: sum over prompt chunks of chunk x (start + chunk / 2)

    `request_s` is the API latency before the engine receives a request. `budget_tokens` is the
    maximum of p + B (vLLM's max_num_batched_tokens).
    """

    weights_s: float
    token_s: float
    wire_s: float
    pair_s: float
    context_s: float
    sequence_s: float
    step_s: float
    request_s: float = 0.005
    budget_tokens: int = 8192

    def filling(self, tokens: float) -> tuple[int, float]:
        """Return how full an engine step with `tokens` prompt tokens is, as (part, share).

        A full step consists of FILLS equal parts. `part` is the index of the part in which the
        tokens end, and `share` (0 to 1) is how much of that part they fill. With FILLS = 4, a step
        that is 60 % full gives (2, 0.4).
        """
        index = FILLS * tokens / self.budget_tokens
        part = int(index)
        if part < FILLS:
            return part, index - part
        return FILLS - 1, 1.0


class _Fit(msgspec.Struct, frozen=True):
    # The share of a GPU's peak rates that engines reach in this module's equation.
    #
    # Efficiency of memory, matrix units, attention and link; microseconds per layer and step with
    # its two all-reduces, and per sequence of an 80-layer model. The peaks, and a finer equation
    # with its own constants, are in policies/sizing/gpus.py.

    memory: float
    flops: float
    attention: float
    link: float
    layer_us: float
    sequence_us: float


_FITS: Mapping[str, _Fit] = MappingProxyType(
    {
        "a100": _Fit(0.74, 0.85, 0.71, 0.34, 69, 11),
        "h100": _Fit(0.88, 0.72, 0.64, 0.51, 52, 7.6),
        "h200": _Fit(0.84, 0.73, 0.60, 0.58, 53.6, 8.0),
        "b200": _Fit(0.93, 0.67, 0.51, 0.47, 59, 10.6),
        "l40s": _Fit(1.0, 0.68, 0.33, 0.11, 190, 50),
    }
)
UNKNOWN_GPU = "h100"
# A model of unknown size is assumed to fill a quarter of its GPUs' memory with 16-bit weights.
UNKNOWN_PARAMS_PER_GPU = 8.75e9


def shape_for(
    gpu: str | None = None,
    tp: int = 1,
    pp: int = 1,
    params_b: float | None = None,
    active_b: float | None = None,
    kv_token_bytes: float | None = None,
    weight_bytes: float = 2.0,
    request_s: float = 0.005,
    budget_tokens: int = 8192,
) -> StepCosts:
    """Estimate the step costs of an engine on `tp` x `pp` GPUs.

    Unknown arguments get neutral values. Layers and width are derived from the number of
    parameters, as in the Llama and Qwen families.

    gpu             GPU type, a key of policies/sizing/gpus.py; None: unknown
    params_b        billions of parameters
    active_b        billions of parameters that each token uses (fewer in a mixture of experts)
    kv_token_bytes  KV cache per token over all layers; None: 8 heads of 128 per layer in 16 bits
    weight_bytes    bytes per parameter
    request_s       API latency in seconds
    budget_tokens   maximum tokens of one step
    """
    kind = GPUS.get((gpu or UNKNOWN_GPU).lower(), GPUS[UNKNOWN_GPU])
    fit = _FITS[kind.fit_of or kind.name]
    params = params_b * 1e9 if params_b is not None else UNKNOWN_PARAMS_PER_GPU * tp * pp
    active = active_b * 1e9 if active_b is not None else params
    layers = min(128.0, 32 * (active / 8e9) ** 0.42)
    width = sqrt(active / (12 * layers))
    kv_bytes = kv_token_bytes if kv_token_bytes is not None else 4096 * layers
    wire_bytes = 2 * layers * 2 * (tp - 1) / tp * 2 * width
    # A pipeline works on as many steps at once as it has stages, but each token passes all stages.
    return StepCosts(
        weights_s=params * weight_bytes / (tp * kind.hbm_bytes_s * fit.memory),
        token_s=2 * active / (tp * pp * kind.flops(weight_bytes) * fit.flops),
        wire_s=wire_bytes / (kind.link_bytes_s * fit.link * pp),
        pair_s=4 * width * layers / (tp * pp * kind.bf16_flops * fit.attention),
        context_s=kv_bytes / (min(tp, 8) * kind.hbm_bytes_s * fit.memory),
        sequence_s=fit.sequence_us * 1e-6 * layers / 80,
        step_s=layers * fit.layer_us * 1e-6,
        request_s=request_s,
        budget_tokens=budget_tokens,
    )


NEUTRAL = shape_for(tp=4)
PRIOR_VAR = 0.25  # variance of a prior's logarithm: the standard deviation is 0.5
PART_VAR = 0.02  # partly full steps cost about 15 % more or less per token than full ones
# Attention and context costs depend on depth and width, which are guessed if unknown.
PAIRS_VAR, CONTEXT_VAR = 0.1, 0.05
FILLS = 4  # parts of a full step; the pace is learned at their ends and interpolated in between
MIX_GAIN = 0.1  # weight of one observation in the running mean of how full steps are
# The minimum weight of an observation of API latency, and the largest latency that counts.
REACH_GAIN, MOST_REACH_S = 0.05, 1.0


class SpeedFactor(NamedTuple):
    """The learned speed of one kind of engine work, as a factor on its estimated time.

    The kinds are prefill, attention and decode. The prices of endpoints use these factors. Each is
    a mean over the usual work of the engine, not the factor of one step.

    factor  correction factor; above 1, the engine is slower than estimated
    var     variance of the factor's logarithm
    """

    factor: float
    var: float


class UsualSpeeds(NamedTuple):
    """How fast an engine is compared with its estimate, for the mix of work that it usually does.

    prefill  factor on the time of prefill
    pairs    factor on the time of attention in prefill
    step     factor on the time of decode steps
    """

    prefill: SpeedFactor
    pairs: SpeedFactor
    step: SpeedFactor


class SpeedBelief:
    """The learned speed of an engine: estimated costs of its steps, and factors that correct them.

    `shape` has the estimates, by the engine's GPUs and model. The factors are learned while
    requests run, from the times of their tokens. A full step is divided into FILLS parts
    (StepCosts.filling), because small matrices do not fill a GPU.

    prompts        factors on the prefill part of steps: one for all of it; one each for steps that
                   are 0, 1, 2 and 3 quarters full; one for attention
    decodes        factors on steps without prompts: one for the whole step, and one for reading the
                   context
    layers         factor on the fixed part of a step with prompts
    speeds         one factor each for prefill, attention and decode steps, for the usual work
    paces          factors on the prefill part of a step that is 0, 1, ... FILLS parts full
    request_s      API latency in seconds before the engine receives a request
    budget_tokens  maximum tokens of one step

    The other attributes are estimates multiplied by their factors:

    flop_s    seconds of compute per decoding sequence
    layers_s  fixed part of a step with prompts
    base_s    fixed part of a step without prompts
    floor_s   lower bound of a step without prompts
    area_s    seconds of attention per query-key pair, with attention's own factor only
    """

    __slots__ = (
        *(
            "area_s",
            "base_s",
            "context_s",
            "decodes",
            "floor_s",
            "flop_s",
            "layers",
            "layers_s",
            "pair_s",
        ),
        *(
            "_context",
            "_mix",
            "_reached",
            "paces",
            "prompts",
            "request_s",
            "budget_tokens",
            "sequence_s",
        ),
        *("shape", "speeds", "token_s"),
    )

    def __init__(self, shape: StepCosts = NEUTRAL) -> None:
        self.shape = shape
        self.prompts = KalmanFilter(PRIOR_VAR, *FILLS * (PART_VAR,), PAIRS_VAR)
        self.decodes, self.layers = KalmanFilter(PRIOR_VAR, CONTEXT_VAR), KalmanFilter(PRIOR_VAR)
        self.speeds = UsualSpeeds(
            SpeedFactor(1.0, PRIOR_VAR), SpeedFactor(1.0, PAIRS_VAR), SpeedFactor(1.0, PRIOR_VAR)
        )
        self.request_s, self.budget_tokens = shape.request_s, shape.budget_tokens
        self._reached = 1.0  # the prior counts as one observation
        self._mix, self._context = [*FILLS * (0.0,), 1.0], 0.0
        self.apply_factors()

    @property
    def was_reached(self) -> bool:
        """Whether a short prompt has shown how long requests take to reach the engine."""
        return self._reached > 1.0

    def apply_factors(self) -> None:
        """Multiply the estimated step costs by the learned factors, after these have changed."""
        self._settle_prompts()
        self._settle_layers()
        self._settle_decodes()

    def _settle_prompts(self) -> None:
        shape, (whole, *parts, pairs) = self.shape, self.prompts.factors
        self.paces = [whole * part for part in parts] + [whole]
        slow = sum(map(mul, self._mix, self.paces))
        self.speeds = UsualSpeeds(
            SpeedFactor(slow, self.prompts.var),
            SpeedFactor(pairs, self.prompts.covar[-1][-1]),
            self.speeds.step,
        )
        self.area_s = pairs * shape.pair_s
        self.token_s, self.pair_s = slow * (shape.token_s + shape.wire_s), slow * self.area_s

    def _settle_layers(self) -> None:
        self.layers_s = self.layers.factors[0] * self.shape.step_s

    def _settle_decodes(self) -> None:
        shape, (slower, context) = self.shape, self.decodes.factors
        usual = slower * (1.0 - self._context + self._context * context)
        prefill, pairs, _ = self.speeds
        self.speeds = UsualSpeeds(prefill, pairs, SpeedFactor(usual, self.decodes.var))
        self.context_s = slower * context * shape.context_s
        self.sequence_s = slower * (shape.sequence_s + shape.wire_s)
        self.flop_s, self.floor_s = slower * shape.token_s, slower * shape.weights_s
        self.base_s = slower * shape.step_s

    def pace(self, tokens: float) -> float:
        """Return the learned factor on the estimated prefill time of a step with `tokens` tokens.

        It is above 1 if the engine is slower than estimated, and depends on how full the step is.
        """
        part, beyond = self.shape.filling(tokens)
        less = self.paces[part]
        return less + beyond * (self.paces[part + 1] - less)

    def prompts_s(self, tokens: float, pairs: float) -> float:
        """Estimate how many seconds prompt tokens add to an engine step, before most corrections.

        Of the learned factors, only that of attention is included. Multiply the result by
        `pace(tokens)`.

        tokens  number of prompt tokens in the step
        pairs   number of their query-key pairs, for attention
        """
        compute_s, weights_s = self.shape.token_s * tokens, self.shape.weights_s
        return (
            (compute_s if compute_s > weights_s else weights_s)
            + self.shape.wire_s * tokens
            + self.area_s * pairs
        )

    def decoding_batch_s(self, batch: int, context: float) -> float:
        """Return the seconds that `batch` decoding sequences add to an engine step with prompts.

        `context` is the total number of tokens in their contexts.
        """
        return self.context_s * context + (self.sequence_s + self.flop_s) * batch

    def observe_prefill(
        self, ratio: float, fills: Sequence[float], pairs_s: float, noise_var: float
    ) -> None:
        """Update the correction factors: prefill took `ratio` times as long as predicted.

        fills      estimated seconds of that prefill, for steps that are 0, 1, ... FILLS parts full.
                   A step between two of these counts for both, as in `pace`
        pairs_s    the part of these seconds that is attention
        noise_var  variance of the ratio's logarithm
        """
        raw_s = sum(fills)
        parts_s = [*map(mul, fills, self.paces)]
        believed_s = sum(parts_s)
        shares = (1.0, *(part_s / believed_s for part_s in parts_s[:FILLS]), pairs_s / raw_s)
        self.prompts.observe(ratio, shares, noise_var)
        self._mix = [
            share_s + MIX_GAIN * (seen_s / raw_s - share_s)
            for share_s, seen_s in zip(self._mix, fills, strict=True)
        ]
        self._settle_prompts()

    def observe_step_overhead(self, ratio: float, noise_var: float) -> None:
        """Learn the time of a prefill step that does not depend on its number of tokens.

        ratio      observed time of that part divided by the predicted time
        noise_var  variance of the ratio's logarithm
        """
        self.layers.observe(ratio, (1.0,), noise_var)
        self._settle_layers()

    def observe_decode(
        self, seen_s: float, base_s: float, context_s: float, noise_var: float
    ) -> None:
        """Update the correction factors: decode steps took `seen_s` seconds.

        base_s     estimated seconds of these steps without reading the context
        context_s  estimated additional seconds for reading the context
        noise_var  variance of the logarithm of the observed ratio
        """
        factor, context = self.decodes.factors
        context_s *= context
        share = context_s / (base_s + context_s)
        self.decodes.observe(seen_s / (factor * (base_s + context_s)), (1.0, share), noise_var)
        self._context += MIX_GAIN * (share - self._context)
        self._settle_decodes()

    def observe_api_latency(self, seen_s: float, weight: float = 1.0) -> None:
        """Update the API latency `request_s`: a request took `seen_s` seconds to the engine's
        scheduler.

        `weight` (0 to 1) is how reliable the observation is.
        """
        self._reached += weight
        gain = weight * max(REACH_GAIN, 1.0 / self._reached)
        self.request_s += gain * (min(MOST_REACH_S, max(0.0, seen_s)) - self.request_s)
