"""Computes the share of a decode step that collectives take, for the checklist of `penstock
doctor`.
"""

from __future__ import annotations

from mockgpu.grids import roofline_for
from mockgpu.roofline import StepWork
from policies.sizing.gpus import Gpu
from policies.sizing.model_shapes import Llm


def collectives_share(model: Llm, gpu: Gpu, tp: int, batch: int, context: int) -> float:
    """Return the share of a decode step's time that collectives take, 0 to 1, by the step-time
    equation.
    """
    parts = roofline_for(model, gpu, tp).terms(StepWork(0, 0.0, batch, batch * context))
    return parts.collectives_s / parts.total_s
