"""GPUs as numbers: peak rates, links, and the eight fitted constants of the step-time equation.

Peaks are vendor figures from aiconfigurator's system files. The constants are fitted to its silicon
tables (data/aic_latencies.json: 70B bf16, 70B fp8 and 8B at TP 1-8);
tests/unit/mockgpu/test_fidelity.py prints the errors. The equation is in roofline.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class Fit(msgspec.Struct, frozen=True):
    """What software achieves: efficiencies of four peaks and the link, and overheads in us."""

    weights_eff: float
    kv_eff: float
    flops_eff: float
    attention_eff: float
    allreduce_us: float
    layer_us: float
    sequence_us: float
    link_eff: float


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. `link_bytes_s` is per direction: NVLink if there is one, else PCIe."""

    name: str
    hbm_bytes: float
    hbm_bytes_s: float
    bf16_flops: float
    fp8_flops: float
    link_bytes_s: float
    nic_bytes_s: float
    fit: Fit
    grid_name: str

    def flops(self, weight_bytes: float) -> float:
        """Return the dense peak for this weight size in bytes.

        A GPU without fp8 units uses bf16.
        """
        return self.fp8_flops if weight_bytes <= 1 else self.bf16_flops


def _table() -> dict[str, Gpu]:
    """Return the peaks and fitted constants.

    L40S is rough: fitted to three rows only (8B TP1, 70B TP4 and TP8 over PCIe). An efficiency
    slightly above one means that measurements exceeded the listed peak.
    """
    a100 = Fit(0.736, 0.753, 0.909, 0.599, 10.7, 45.9, 10.9, 0.406)
    h100 = Fit(0.881, 0.943, 0.748, 0.690, 5.0, 41.2, 7.3, 0.582)
    h200 = Fit(0.829, 0.959, 0.739, 0.579, 7.2, 35.5, 10.8, 0.651)
    b200 = Fit(0.916, 0.888, 0.668, 0.500, 2.2, 47.8, 16.9, 0.496)
    l40s = Fit(1.057, 0.818, 0.683, 0.331, 32.1, 129.8, 51.6, 0.113)
    gpus = (
        #    name, HBM bytes, HBM B/s, bf16, fp8, link B/s, NIC B/s
        Gpu("a100", 80e9, 2.039e12, 312e12, 312e12, 300e9, 25e9, a100, "a100_sxm"),
        Gpu("h100", 80e9, 3.35e12, 989e12, 1978e12, 450e9, 50e9, h100, "h100_sxm"),
        Gpu("h200", 141e9, 4.8e12, 989e12, 1978e12, 450e9, 50e9, h200, "h200_sxm"),
        Gpu("b200", 180e9, 7.7e12, 2250e12, 4500e12, 900e9, 100e9, b200, "b200_sxm"),
        Gpu("l40s", 48.3e9, 0.864e12, 362e12, 733e12, 32e9, 50e9, l40s, "l40s"),
    )
    return {gpu.name: gpu for gpu in gpus}


GPUS: Mapping[str, Gpu] = MappingProxyType(_table())


def gpu_named(name: str) -> Gpu:
    """Return the GPU of this name, in any case. Raises ValueError, listing the known ones."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ValueError(f"unknown GPU {name!r}: known are {', '.join(GPUS)}")
    return gpu
