"""Textbook formulas for the speed and memory of LLMs on GPUs, to check published numbers."""

from __future__ import annotations

import math

from policies.sizing.gpus import Gpu
from policies.sizing.model_shapes import Llm


def min_tp(model: Llm, gpu: Gpu) -> int:
    return math.ceil(model.weights_bytes / gpu.hbm_bytes)


def kv_transfer_s(model: Llm, tokens: int, bytes_s: float) -> float:
    return tokens * model.kv_token_bytes / bytes_s


def weights_load_s(model: Llm, bytes_s: float) -> float:
    return model.weights_bytes / bytes_s


def ideal_decode_s(model: Llm, gpu: Gpu, tp: int) -> float:
    return model.weights_bytes / (tp * gpu.hbm_bytes_s)
