"""Corrects computed step times, so that they agree with measured ones where there are any.

A correction is the ratio measured / computed at the measured points, and is interpolated between
them. The ratio is near one and varies slowly, so it interpolates better than milliseconds. Outside
the measured range, the ratio at the nearest edge applies. Data and sources: data/README.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from math import log2

import msgspec

from mockgpu.timing.roofline import PROFILES, Profile, Roofline, StepWork
from policies.sizing.gpus import Gpu
from policies.sizing.model_shapes import Llm


class Grid(msgspec.Struct, frozen=True):
    """The measured step times of one model on one type of GPU with one TP size.

    It is one row of the data file.

    prefill  milliseconds of a prefill by prompt tokens. Example: {"4096": 93.2}
    decode   milliseconds of a decode step by batch size and context of each sequence. The key
             "b16c4096" is a batch of 16 sequences with 4,096 tokens each
    """

    model: str
    system: str
    tp: int
    prefill: Mapping[str, float]
    decode: Mapping[str, float]

    def prefill_points(self) -> Iterator[tuple[int, float]]:
        """Yield the measured prefills as pairs (prompt tokens, seconds)."""
        return ((int(tokens), ms / 1e3) for tokens, ms in self.prefill.items())

    def decode_points(self) -> Iterator[tuple[int, int, float]]:
        """Yield the measured decode steps as (sequences, context tokens per sequence, seconds)."""
        for key, ms in self.decode.items():
            seqs, context = key[1:].split("c")
            yield int(seqs), int(context), ms / 1e3


def load_grids() -> list[Grid]:
    return msgspec.json.decode(
        files("mockgpu").joinpath("data/aic_latencies.json").read_bytes(), type=list[Grid]
    )


def grid_for(model: Llm, gpu: Gpu, tp: int, grids: Iterable[Grid]) -> Grid | None:
    """Return the measured step times of this model, GPU and TP size; None: none were measured."""
    for grid in grids:
        if (
            grid.tp == tp
            and grid.system == gpu.grid_name
            and grid.model.rpartition("/")[2] == model.grid_name
        ):
            return grid
    return None


class LogCurve:
    """A function of one variable, given by points and interpolated linearly in log2(x).

    Below the first point and above the last one, it is constant.
    """

    __slots__ = ("_xs", "_ys")

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        pairs = sorted(points)
        self._xs = [log2(x) for x, _ in pairs]
        self._ys = [y for _, y in pairs]

    def value(self, x: float) -> float:
        """Return the interpolated value of the curve at `x`, which must be positive."""
        xs, ys, lx = self._xs, self._ys, log2(x)
        i = bisect_right(xs, lx)
        if i == 0:
            return ys[0]
        if i == len(xs):
            return ys[-1]
        left = xs[i - 1]
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (lx - left) / (xs[i] - left)


class LogSurface:
    """A function of two variables, given by points and interpolated bilinearly in their log2.

    Outside the range of the points, the value at the nearest edge applies.
    """

    __slots__ = ("_lines", "_xs")

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        rows: dict[float, list[tuple[float, float]]] = {}
        for x, y, value in points:
            rows.setdefault(x, []).append((y, value))
        self._xs = [log2(x) for x in sorted(rows)]
        self._lines = [LogCurve(rows[x]) for x in sorted(rows)]

    def value(self, x: float, y: float) -> float:
        """Return the interpolated value at `x` and `y`, which must be positive."""
        xs, lines, lx = self._xs, self._lines, log2(x)
        i = bisect_right(xs, lx)
        if i == 0:
            return lines[0].value(y)
        if i == len(xs):
            return lines[-1].value(y)
        low, high = lines[i - 1].value(y), lines[i].value(y)
        return low + (high - low) * (lx - xs[i - 1]) / (xs[i] - xs[i - 1])


class GridCorrection:
    """Correction factors (measured / computed step time), interpolated between measured points."""

    def __init__(
        self,
        equation: Roofline,
        prefill: Iterable[tuple[int, float]],
        decode: Iterable[tuple[int, int, float]],
    ) -> None:
        self._prefill = LogCurve((n, s / equation.equation_s(whole_prompt(n))) for n, s in prefill)
        self._decode = LogSurface(
            (b, c, s / equation.equation_s(StepWork(0, 0.0, b, b * c))) for b, c, s in decode
        )

    def prefill(self, tokens: int) -> float:
        """Return the correction factor for a prefill-only step of `tokens` prompt tokens."""
        return self._prefill.value(tokens)

    def decode(self, seqs: float, context: float) -> float:
        """Return the correction factor for a decode-only step of `seqs` sequences.

        `context` is the sum of their contexts, in tokens.
        """
        return self._decode.value(seqs, max(1.0, context / seqs))


def whole_prompt(tokens: int) -> StepWork:
    """Return the work of a step that computes a whole prompt, of which no token is cached."""
    return StepWork(tokens, tokens * tokens / 2)


def roofline_for(
    model: Llm,
    gpu: Gpu,
    tp: int,
    profile: Profile = PROFILES["2026"],
    grids: Sequence[Grid] | None = None,
) -> Roofline:
    """Return an engine's step-time model, corrected by measured step times if there are any."""
    grid = (
        grid_for(model, gpu, tp, load_grids() if grids is None else grids)
        if profile.exact
        else None
    )
    equation = Roofline(model, gpu, tp, profile)
    if grid is None:
        return equation
    return Roofline(
        model,
        gpu,
        tp,
        profile,
        GridCorrection(equation, grid.prefill_points(), grid.decode_points()),
    )
