"""Computes the share of a decode step that collectives take, for checks of `penstock doctor`."""

from __future__ import annotations

from mockgpu.timing.roofline import StepWork
from mockgpu.timing.step_time_grids import roofline_for
from policies.sizing.gpus import Gpu
from policies.sizing.model_shapes import Llm


def collectives_share(model: Llm, gpu: Gpu, tp: int, batch: int, context: int) -> float:
    """Return the share of a decode step's time (0 to 1) that collective operations take.

    Collectives, such as all-reduce, exchange data among the GPUs of an engine. The share is
    computed by the step-time equation.

    batch    number of decoding requests
    context  tokens of each request's context
    """
    parts = roofline_for(model, gpu, tp).terms(StepWork(0, 0.0, batch, batch * context))
    return parts.collectives_s / parts.total_s
