"""Copies a model with its weights rounded to a few bits, as a quantised checkpoint has them.

Run `rounded_copy.py FROM TO BITS` with the Python interpreter of the engines. The copy keeps its
type: each weight is the product of a small integer and the scale of its group, rounded to nearest.
Embeddings and the output head stay as they are, as in published checkpoints.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 32  # weights with one scale
_KEPT = ("embed_tokens", "lm_head")


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a weight matrix rounded to `bits` bits, as in a quantised model.

    The weights are divided into groups. Each weight becomes an integer of `bits` bits times the
    scale of its group.
    """
    most = 2 ** (bits - 1) - 1
    groups = weight.float().reshape(-1, GROUP)
    scales = groups.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / most
    whole = (groups / scales).round().clamp(-most - 1, most)
    return (whole * scales).reshape(weight.shape).to(weight.dtype)


def main(source: Path, target: Path, bits: int) -> None:
    """Copy a model from the folder `source` to a new one, with weights rounded to `bits` bits."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not any(part in name for part in _KEPT):
            tensors[name] = rounded(tensor, bits)
    save_file(tensors, file, metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
