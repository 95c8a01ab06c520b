"""GPU types as numbers: memory, peak rates, links, and eight fitted constants for step times.

Peaks are the vendors' figures, with a source for each GPU. The constants are fitted to measurements
of aiconfigurator (mockgpu/data/aic_latencies.json: 70B bf16, 70B fp8 and 8B at TP 1-8).
tests/unit/mockgpu/test_fidelity.py prints the errors. The equation is in
mockgpu/timing/roofline.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec


class Fit(msgspec.Struct, frozen=True):
    """The fitted constants of a GPU's step times.

    An efficiency is the share (0 to 1) of a peak rate that is reached.

    weights_eff    efficiency of the memory bandwidth when weights are read
    kv_eff         efficiency of the memory bandwidth when the KV cache is read
    flops_eff      efficiency of FLOP/s in matrix products
    attention_eff  efficiency of FLOP/s in prefill attention
    allreduce_us   microseconds of overhead of one all-reduce
    layer_us       microseconds of overhead of one layer in a step
    sequence_us    microseconds of overhead of one sequence, in a model of 80 layers
    link_eff       efficiency of the bandwidth of links between GPUs
    """

    weights_eff: float
    kv_eff: float
    flops_eff: float
    attention_eff: float
    allreduce_us: float
    layer_us: float
    sequence_us: float
    link_eff: float


class Gpu(msgspec.Struct, frozen=True):
    """A GPU type: memory, peak rates, links and fitted constants.

    name           name of the type
    hbm_bytes      bytes of memory
    hbm_bytes_s    peak memory bandwidth in bytes/s
    bf16_flops     dense peak in FLOP/s with bf16
    fp8_flops      dense peak in FLOP/s with fp8; that of bf16 if it has no fp8 units
    link_bytes_s   bytes/s per direction of NVLink or xGMI, or of PCIe if there is neither
    nic_bytes_s    bytes/s of its network adapter
    fit            fitted constants of its step times
    grid_name      its name in tables of measured step times; empty: it is in none
    domain_gpus    number of GPUs that NVLink or xGMI connects: 8 in an HGX server, 72 in an NVL72
    has_fast_link  whether the GPUs of a TP group have a faster link than PCIe
    fit_of         the GPU type whose fitted constants are used for this one; empty: the constants
                   were fitted to this type
    errors         relative errors of the step-time equation, as 90th percentiles (prefill, decode)
    source         where the peaks are from
    """

    name: str
    hbm_bytes: float
    hbm_bytes_s: float
    bf16_flops: float
    fp8_flops: float
    link_bytes_s: float
    nic_bytes_s: float
    fit: Fit
    grid_name: str
    domain_gpus: int = 8
    has_fast_link: bool = True
    fit_of: str = ""
    errors: tuple[float, float] = (0.3, 0.3)
    source: str = "given by the user"

    def flops(self, weight_bytes: float) -> float:
        """Return the GPU's dense peak in FLOP/s for weights of this many bytes per parameter.

        A GPU without fp8 units uses bf16.
        """
        return self.fp8_flops if weight_bytes < 2 else self.bf16_flops


# Errors of borrowed constants are a judgement: twice the worst median of a fitted GPU's tails.
BORROWED_ERRORS = (0.4, 0.25)


# L40S is rough: fitted to three rows only (8B TP1, 70B TP4 and TP8 over PCIe). An efficiency
# slightly above one means that measurements exceeded the listed peak.
_A100 = Fit(0.736, 0.753, 0.909, 0.599, 10.7, 45.9, 10.9, 0.406)
_H100 = Fit(0.881, 0.943, 0.748, 0.690, 5.0, 41.2, 7.3, 0.582)
_H200 = Fit(0.829, 0.959, 0.739, 0.579, 7.2, 35.5, 10.8, 0.651)
_B200 = Fit(0.916, 0.888, 0.668, 0.500, 2.2, 47.8, 16.9, 0.496)
_L40S = Fit(1.057, 0.818, 0.683, 0.331, 32.1, 129.8, 51.6, 0.113)
_GPUS = (
    #    name, HBM bytes, HBM B/s, bf16, fp8, link B/s, NIC B/s
    Gpu(
        *("a100", 80e9, 2.039e12, 312e12, 312e12, 300e9, 25e9, _A100, "a100_sxm"),
        errors=(0.155, 0.086),
        source="NVIDIA A100 80GB SXM data sheet; DGX A100: one 200 Gb/s NIC per GPU",
    ),
    Gpu(
        *("h100", 80e9, 3.35e12, 989e12, 1978e12, 450e9, 50e9, _H100, "h100_sxm"),
        errors=(0.208, 0.114),
        source="NVIDIA H100 SXM data sheet; DGX H100: one 400 Gb/s NIC per GPU",
    ),
    Gpu(
        *("h200", 141e9, 4.8e12, 989e12, 1978e12, 450e9, 50e9, _H200, "h200_sxm"),
        errors=(0.152, 0.081),
        source="NVIDIA H200 SXM data sheet; DGX H200: one 400 Gb/s NIC per GPU",
    ),
    Gpu(
        *("b200", 180e9, 7.7e12, 2250e12, 4500e12, 900e9, 100e9, _B200, "b200_sxm"),
        errors=(0.171, 0.118),
        source="NVIDIA DGX B200 data sheet, per GPU; aiconfigurator's b200_sxm system file",
    ),
    Gpu(
        *("gb200", 198.64e9, 8.0e12, 2500e12, 5000e12, 900e9, 100e9, _B200, ""),
        domain_gpus=72,
        fit_of="b200",
        errors=BORROWED_ERRORS,
        source="NVIDIA GB200 NVL72 data sheet, per GPU; 185 GiB as nvidia-smi reports them",
    ),
    Gpu(
        *("l40s", 48.3e9, 0.864e12, 362e12, 733e12, 32e9, 50e9, _L40S, "l40s"),
        has_fast_link=False,
        errors=(0.466, 0.201),
        source="NVIDIA L40S data sheet: PCIe 4.0 x16, no NVLink; 45 GiB visible",
    ),
    Gpu(
        *("mi300x", 192e9, 5.3e12, 1307e12, 2615e12, 448e9, 50e9, _H100, ""),
        fit_of="h100",
        errors=BORROWED_ERRORS,
        source="AMD Instinct MI300X data sheet: 7 xGMI links of 64 GB/s per direction",
    ),
)

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _GPUS})


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name; upper and lower case are equal.

    Raises ValueError, with a list of the known names, if there is none.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ValueError(f"unknown GPU {name!r}; known GPUs: {', '.join(GPUS)}")
    return gpu


# Member of a user's GPU file -> field of Gpu, and the factor from the file's unit.
_MEMBERS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "hbm_gb": ("hbm_bytes", 1e9),
        "hbm_tb_s": ("hbm_bytes_s", 1e12),
        "bf16_tflops": ("bf16_flops", 1e12),
        "fp8_tflops": ("fp8_flops", 1e12),
        "link_gb_s": ("link_bytes_s", 1e9),
        "nic_gb_s": ("nic_bytes_s", 1e9),
    }
)


def gpu_from_members(members: Any) -> Gpu:
    """Build a user-defined GPU from a JSON object, and return it.

    `name` and the six fields of _MEMBERS are required. Optional are `domain_gpus` (8), `fast_link`
    (true), `source`, and `like` (h100), the GPU whose fitted constants are used. Raises ValueError
    with the field that is wrong.
    """
    _check_members(members)
    like = gpu_named(str(members.get("like", "h100")))
    peaks = {field: members[key] * unit for key, (field, unit) in _MEMBERS.items()}
    return Gpu(
        name=str(members["name"]),
        fit=like.fit,
        grid_name="",
        domain_gpus=int(members.get("domain_gpus", 8)),
        has_fast_link=members.get("fast_link", True) is True,
        fit_of=like.name,
        errors=BORROWED_ERRORS,
        source=str(members.get("source", "given by the user")),
        **peaks,
    )


def _check_members(members: Any) -> None:
    wanted = {"name", *_MEMBERS}
    known = wanted | {"domain_gpus", "fast_link", "like", "source"}
    if not isinstance(members, dict):
        raise ValueError(
            f"a user-defined GPU must be a JSON object with the fields {', '.join(sorted(wanted))}"
        )
    if missing := sorted(wanted - members.keys()):
        raise ValueError(f"the user-defined GPU lacks the fields {', '.join(missing)}")
    if unknown := sorted(members.keys() - known):
        names = ", ".join(sorted(known))
        raise ValueError(
            f"the user-defined GPU has unknown fields {', '.join(unknown)}; known fields: {names}"
        )
    for key in (*_MEMBERS, "domain_gpus"):
        value = members.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(
                f"{key} of the user-defined GPU must be a positive number, not {value!r}"
            )
