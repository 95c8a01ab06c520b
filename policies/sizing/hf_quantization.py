"""Reads from a model's config.json in which format its weights are stored.

Quantised weights have scales beside them, one per group of weights. Source of the formats: vLLM's
model_executor/layers/quantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from policies.sizing.hf_config_fields import ConfigError

# Members that list the modules whose weights are not quantised, by tool.
_SKIPPED = (
    *("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude"),
    *("llm_int8_skip_modules", "exclude_modules_regex"),
)
_ATTENTION = ("self_attn", "attention")
_SHARED = ("shared_expert",)
# Bytes per weight with the scales of its group, by the name of an algorithm or type.
_NAMED_BYTES = (
    ("nvfp4", 0.5 + 1 / 16),  # a scale of one byte for 16 weights
    ("mxfp4", 0.5 + 1 / 32),  # a scale of one byte for 32 weights
    ("fp4", 0.5 + 1 / 32),
    ("mxfp8", 1.0 + 1 / 32),
    ("w4a", 0.5 + 2 / 128),
    ("int4", 0.5 + 2 / 128),
    ("float8", 1.0),
    ("fp8", 1.0),
    ("int8", 1.0),
)
_SCALE_BYTES = 2


class WeightFormat(msgspec.Struct, frozen=True):
    """How the weights of a checkpoint are stored.

    weight_bytes       mean bytes of a quantised weight, with its share of the scales
    only_experts       whether only the routed experts are quantised
    keeps_attention    whether attention keeps two bytes per weight
    keeps_shared       whether shared experts keep two bytes per weight
    """

    weight_bytes: float = 2.0
    only_experts: bool = False
    keeps_attention: bool = False
    keeps_shared: bool = False


def weight_format(section: Any) -> WeightFormat:
    """Return the format that the quantization_config of a config.json describes.

    Without one, weights have two bytes: engines load float32 checkpoints as bfloat16, too. Raises
    ConfigError if the format is unknown.
    """
    if not isinstance(section, dict):
        return WeightFormat()
    method = str(section.get("quant_method", "")).lower()
    skipped = [str(name) for key in _SKIPPED for name in _listed(section.get(key))]
    if method == "mxfp4":
        return WeightFormat(0.5 + 1 / 32, only_experts=True)
    size = _bytes_each(section, method)
    if size is None:
        raise ConfigError(
            f"config.json: unknown quantization_config (quant_method {method!r}); known are fp8, "
            "mxfp4, nvfp4, bitsandbytes, and methods with bits or num_bits"
        )
    return WeightFormat(
        size,
        keeps_attention=_is_skipped(skipped, _ATTENTION),
        keeps_shared=_is_skipped(skipped, _SHARED),
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_skipped(skipped: list[str], names: tuple[str, ...]) -> bool:
    # Return whether a kind of module is skipped in all layers. Names of single layers, such as
    # "model.layers.0.self_attn", count if there are many of them.
    found = [name for name in skipped if any(part in name for part in names)]
    layers = {_layer_of(name) for name in found}
    return None in layers or len(layers) >= 8


def _layer_of(name: str) -> int | None:
    # Return the layer that a module's name contains; None: the name is a pattern for all layers.
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _bytes_each(section: Mapping[str, Any], method: str) -> float | None:
    if method == "bitsandbytes":
        # A scale of four bytes for 64 weights of four bits.
        return 0.5 + 4 / 64 if section.get("load_in_4bit") else 1.0
    for weights in _weight_sections(section):
        bits = _integer(weights, "bits", "num_bits", "nbits", "w_bit")
        if bits is not None and bits <= 16:
            return bits / 8 + _scales(weights, section, bits)
        if (named := _named(str(weights.get("dtype", "")))) is not None:
            return named
    algorithm = str(section.get("quant_algo") or _first_text(section.get("quant_type")) or method)
    return _named(algorithm.lower())


def _named(text: str) -> float | None:
    return next((size for name, size in _NAMED_BYTES if name in text), None)


def _first_text(value: Any) -> str:
    # Return the first type that torchao's `quant_type` names.
    if isinstance(value, dict):
        kind = value.get("_type")
        return str(kind) if kind else _first_text(next(iter(value.values()), ""))
    return value if isinstance(value, str) else ""


def _weight_sections(section: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    # Yield the parts that describe weights: not those of activations or of the KV cache.
    yield section
    pending = [(section, 0)]
    while pending:
        part, depth = pending.pop(0)
        for name, value in part.items():
            inner = value[0] if isinstance(value, list) and value else value
            if not isinstance(inner, dict) or "activation" in name or "kv_cache" in name:
                continue
            if name in ("input_tensors", "output_tensors", "bias"):
                continue
            yield inner
            if depth < 3:
                pending.append((inner, depth + 1))


def _integer(section: Mapping[str, Any], *names: str) -> int | None:
    found = (section.get(name) for name in names)
    return next((each for each in found if isinstance(each, int) and each > 0), None)


def _scales(weights: Mapping[str, Any], section: Mapping[str, Any], bits: int) -> float:
    # Return the bytes of scales and zero points per weight.
    group = _integer(weights, "group_size", "q_group_size")
    if group is None or bits >= 16:
        return 0.0
    if bits == 4 and weights.get("type") == "float":
        return 1 / group
    zero_points = bits / 8 if section.get("zero_point") or "desc_act" in section else 0.0
    return (_SCALE_BYTES + zero_points) / group
