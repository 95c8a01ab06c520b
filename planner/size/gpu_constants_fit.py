"""Fits a GPU's eight speed constants to the times of recorded answers.

The equation is that of mockgpu/timing/roofline.py. The fit is damped least squares on the
logarithms of times, with Huber weights against outliers. A constant that the log does not determine
stays near its prior value. So a plan for another TP size than the log's changes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import median

import msgspec

from mockgpu.timing.roofline import PROFILES, Roofline, StepWork
from planner.replay.argument_parsing import ArgumentError, parse_seconds
from planner.size.plan_draft import SizingError
from planner.size.recorded_step_times import DecodePhase, PrefillPhase, phases_of, read_answers
from planner.size.units import ms
from policies.sizing.gpus import Fit, Gpu
from policies.sizing.layout_facts import facts_of
from policies.sizing.model_shapes import Llm
from policies.sizing.parallelism_rules import valid_tp_sizes

LEAST_PHASES = 50
BOUND = log(4.0)  # a constant is at most four times its prior, and at least a quarter of it
PRIOR_SIGMA = 0.5  # standard deviation of the logarithm of a constant, before the fit
TIME_SIGMA = 0.05  # standard deviation of the logarithm of a measured time, in the first fit
LEAST_SIGMA = 0.003  # minimum of it in the second fit, which uses the spread that the first found
MOST_ROUNDS = 30
LEAST_GAIN = 1e-4  # share by which a round must reduce the squared residuals for another round
HELD_OUT = 5  # every fifth phase is not fitted, and measures the error of the fit

Phase = PrefillPhase | DecodePhase
_KINDS: tuple[type[Phase], ...] = (PrefillPhase, DecodePhase)
Residuals = Callable[[Sequence[float]], list[float]]


class Calibration(msgspec.Struct, frozen=True):
    """The speed constants of a GPU that were fitted to an access log, and how exact they are.

    Errors are measured on data that was not used for the fit.

    gpu           the GPU with fitted constants; its `errors` are the 90th percentiles
    prior_errors  90th percentiles of the errors before the fit, for (prefill, decode)
    api_s         seconds of a request outside of engine steps
    prefills      number of measured prefills, for the fit and the errors together
    decodes       number of measured answers, for the fit and the errors together
    """

    gpu: Gpu
    prior_errors: tuple[float, float]
    api_s: float
    prefills: int
    decodes: int


def calibrate_from(model: Llm, gpu: Gpu, tp: int, log_file: Path, last: str) -> Calibration:
    """Fit the GPU's speed constants to the measurements at the end of an access log.

    tp        TP size of the engines that wrote the log
    log_file  the access log
    last      how much of the end of the log to read, such as 60m

    Raises SizingError if the log or `last` is invalid.
    """
    sizes = valid_tp_sizes(facts_of(model), gpu.domain_gpus)
    if tp not in sizes:
        valid = ", ".join(map(str, sizes))
        raise SizingError(
            f"--measured-tp {tp} is impossible for {model.name}; valid TP sizes: {valid}"
        )
    try:
        last_s = parse_seconds(last)
    except ArgumentError as error:
        raise SizingError(f"--last: {error}") from None
    return calibrate(model, gpu, tp, phases_of(read_answers(log_file, last_s), model))


def calibration_lines(found: Calibration, tp: int, log_file: Path) -> Iterator[str]:
    """Yield the fit of a GPU's constants as text: errors before and after, then each constant."""
    gpu, before = found.gpu, found.prior_errors
    yield (
        f"{gpu.name}: constants fitted to {found.prefills} prefills and {found.decodes} answers of "
        f"{log_file} at TP {tp}"
    )
    for index, kind in enumerate(("prefill", "decode")):
        yield (
            f"  90 % of {kind} times that the fit did not see are within {gpu.errors[index]:.1%}, "
            f"before it {before[index]:.1%}"
        )
    constants = msgspec.structs.asdict(gpu.fit).items()
    yield "  " + ", ".join(f"{name} {value:.3g}" for name, value in constants)
    yield f"  outside of steps: {ms(found.api_s)} per request"


def calibrate(model: Llm, gpu: Gpu, tp: int, phases: Sequence[Phase]) -> Calibration:
    """Fit a GPU's constants to prefills and decodes measured on engines of `tp` of these GPUs.

    Raises SizingError if there are fewer than LEAST_PHASES measured prefills or decodes.
    """
    prefills = sum(isinstance(phase, PrefillPhase) for phase in phases)
    decodes = len(phases) - prefills
    if min(prefills, decodes) < LEAST_PHASES:
        raise SizingError(
            f"--calibrate needs at least {LEAST_PHASES} prefills while no answer was generated, "
            f"and {LEAST_PHASES} answers of usable length; the log has {prefills} and {decodes}"
        )
    held_out = phases[::HELD_OUT]
    kept = [phase for index, phase in enumerate(phases) if index % HELD_OUT]
    start = [0.0] * (len(Fit.__struct_fields__) + 1)
    # The measured times spread less than TIME_SIGMA. With it, the prior would hide the differences
    # that separate related constants, such as those of sequences and of their KV. The second fit
    # therefore uses the measured spread.
    first = _fitted(model, gpu, tp, kept, start, dict.fromkeys(_KINDS, TIME_SIGMA))
    logs = _fitted(model, gpu, tp, kept, first, _spreads(model, gpu, tp, kept, first))
    fitted, prior = _scaled(gpu, logs), _scaled(gpu, start)
    errors = _tails(model, fitted, tp, _api_s(logs), held_out)
    fitted = msgspec.structs.replace(fitted, errors=errors)
    before = _tails(model, prior, tp, _api_s(start), held_out)
    return Calibration(fitted, before, _api_s(logs), prefills, decodes)


def _fitted(
    model: Llm,
    gpu: Gpu,
    tp: int,
    phases: Sequence[Phase],
    start: Sequence[float],
    sigmas: Mapping[type[Phase], float],
) -> list[float]:
    # Return the logarithms of the constants' factors; residuals beyond two sigmas are outliers.
    weights = [_weight(phase) for phase in phases]

    def residuals(logs: Sequence[float]) -> list[float]:
        errors = _errors(model, _scaled(gpu, logs), tp, _api_s(logs), phases)
        weighed = [
            _huber(error / sigmas[type(phase)]) * weight
            for error, phase, weight in zip(errors, phases, weights, strict=True)
        ]
        return weighed + [value / PRIOR_SIGMA for value in logs]

    return least_squares(residuals, start, BOUND)


def _weight(phase: Phase) -> float:
    # Return the weight of a phase's residual. Decode phases that overlap measure the same steps. If
    # each counted in full, small errors of the equation for decode steps would outweigh the
    # measured prefills.
    return phase.overlap**-0.5 if isinstance(phase, DecodePhase) else 1.0


def _spreads(
    model: Llm, gpu: Gpu, tp: int, phases: Sequence[Phase], logs: Sequence[float]
) -> Mapping[type[Phase], float]:
    # Return the standard deviation of each kind's residuals, from their median without outliers.
    errors = list(_errors(model, _scaled(gpu, logs), tp, _api_s(logs), phases))
    pairs = list(zip(phases, errors, strict=True))
    return {
        kind: max(
            LEAST_SIGMA,
            1.4826 * median(abs(error) for phase, error in pairs if isinstance(phase, kind)),
        )
        for kind in _KINDS
    }


def _scaled(gpu: Gpu, logs: Sequence[float]) -> Gpu:
    # Return the GPU with fitted constants and without its measured grid, which would replace the
    # fitted times at each of its points.
    names = Fit.__struct_fields__
    values = {name: getattr(gpu.fit, name) * exp(logs[i]) for i, name in enumerate(names)}
    return msgspec.structs.replace(gpu, fit=Fit(**values), grid_name="", fit_of="")


def _api_s(logs: Sequence[float]) -> float:
    return PROFILES["2026"].request_s * exp(logs[-1])


def _errors(
    model: Llm, gpu: Gpu, tp: int, api_s: float, phases: Sequence[Phase]
) -> Iterator[float]:
    # Yield the logarithm of predicted / measured time of each phase.
    line = Roofline(model, gpu, tp, PROFILES["2026"])
    for phase in phases:
        yield log(_predicted_s(line, phase, api_s) / phase.seconds)


def _predicted_s(line: Roofline, phase: Phase, api_s: float) -> float:
    decode_only = StepWork(0, 0.0, phase.seqs, phase.context)
    decode_only_s = line.equation_s(decode_only) if phase.seqs else 0.0
    if isinstance(phase, PrefillPhase):
        # A prompt that waits for no other one arrives half a step before the end of a decode step,
        # on average.
        chunks = (
            decode_only._replace(prefill_tokens=tokens, attention_area=area)
            for tokens, area in phase.chunks
        )
        before_s = 0.0 if phase.was_queued else api_s + decode_only_s / 2
        return before_s + sum(map(line.equation_s, chunks))
    total_s = decode_only_s * phase.steps
    for tokens, area in phase.chunks:
        work = decode_only._replace(prefill_tokens=tokens, attention_area=area)
        total_s += line.equation_s(work) - decode_only_s
    return total_s


def _tails(
    model: Llm, gpu: Gpu, tp: int, api_s: float, phases: Sequence[Phase]
) -> tuple[float, float]:
    errors = list(_errors(model, gpu, tp, api_s, phases))
    tails = []
    for kind in (PrefillPhase, DecodePhase):
        sizes = sorted(
            abs(exp(error) - 1)
            for error, phase in zip(errors, phases, strict=True)
            if isinstance(phase, kind)
        )
        tails.append(sizes[int(0.9 * len(sizes))] if sizes else 0.0)
    return tails[0], tails[1]


def _huber(value: float) -> float:
    # Return a residual whose square is Huber's loss with its knee at two standard deviations.
    size = abs(value)
    root = size if size <= 2 else (4 * size - 4) ** 0.5
    return root if value >= 0 else -root


def least_squares(residuals: Residuals, start: Sequence[float], bound: float) -> list[float]:
    """Return the parameter values, within -bound to bound, that minimise the squared residuals.

    Uses Levenberg and Marquardt's method with a numeric Jacobian.
    """
    values, damping = list(start), 1e-2
    found = residuals(values)
    loss = _squares(found)
    for _ in range(MOST_ROUNDS):
        columns = _jacobian(residuals, values, found)
        normal = [[sum(map(float.__mul__, a, b)) for b in columns] for a in columns]
        slope = [-sum(map(float.__mul__, column, found)) for column in columns]
        gain = 0.0
        while damping < 1e8:
            damped = [
                [value * (1 + damping * (row == column)) for column, value in enumerate(line)]
                for row, line in enumerate(normal)
            ]
            step = solve(damped, slope)
            tried = [min(bound, max(-bound, a + b)) for a, b in zip(values, step, strict=True)]
            errors = residuals(tried)
            gain = loss - _squares(errors)
            if gain > 0:
                values, found, loss, damping = tried, errors, loss - gain, damping / 5
                break
            damping *= 5
        if gain <= LEAST_GAIN * loss:
            return values
    return values


def _jacobian(
    residuals: Residuals, values: Sequence[float], found: Sequence[float]
) -> list[list[float]]:
    # Return, for each value, the slope of every residual; `found` are the residuals at `values`.
    columns = []
    for index in range(len(values)):
        moved = list(values)
        moved[index] += 1e-4
        pairs = zip(residuals(moved), found, strict=True)
        columns.append([(after - before) / 1e-4 for after, before in pairs])
    return columns


def _squares(residuals: Sequence[float]) -> float:
    return sum(value * value for value in residuals)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return the solution x of the linear equations matrix x = right, by elimination.

    The matrix must be positive definite.
    """
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = rows[row][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[row][column] -= factor * rows[pivot][column]
    found = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (rows[row][size] - known) / rows[row][row]
    return found
