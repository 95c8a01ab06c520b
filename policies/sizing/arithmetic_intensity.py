"""Arithmetic intensity: the number of FLOPs that a matrix product does per byte that it moves."""

from __future__ import annotations

ACTIVATION_BYTES = 2.0


def matrix_intensity(rows: int, width: int, tp: int, weight_bytes: float) -> float:
    """Return the FLOPs per byte of the product (rows, width) x (width, width / tp) on one GPU.

    The bytes are those of the input, the weights and the output. Tensor parallelism divides weights
    and output but not the input, so it lowers the intensity.
    """
    columns = width / tp
    moved = ACTIVATION_BYTES * rows * (width + columns) + weight_bytes * width * columns
    return 2 * rows * width * columns / moved
