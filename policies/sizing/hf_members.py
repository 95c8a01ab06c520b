"""Typed access to the fields of a config.json, with errors that state what is valid."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

MAX_COUNT = 1 << 40

# Members that published files of a family leave out, from transformers' Gemma3TextConfig.
_GEMMA_3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4_096,
    "sliding_window_pattern": 6,
}
FAMILY_DEFAULTS: Mapping[str, Mapping[str, int]] = MappingProxyType({"gemma3_text": _GEMMA_3})

_ENCODERS = frozenset(
    {
        *("albert", "bart", "bert", "clip", "deberta", "deberta-v2", "distilbert", "electra"),
        *("modernbert", "mpnet", "mt5", "nomic_bert", "roberta", "t5", "whisper", "xlm-roberta"),
    }
)


class ConfigError(ValueError):
    """Raised if a config.json does not describe a supported decoder."""


class ConfigMembers:
    """The fields of a config.json, with the defaults of the model's family.

    Raises ConfigError if the model has an encoder, or when a field of a wrong type is read.
    """

    def __init__(self, members: dict[str, Any]) -> None:
        self.family = str(members.get("model_type", ""))
        if self.family in _ENCODERS or members.get("is_encoder_decoder") is True:
            raise ConfigError(
                f"config.json does not describe a decoder-only model (model_type {self.family!r}); "
                "only decoder-only models can be sized"
            )
        given = {name: value for name, value in members.items() if value is not None}
        self._members = {**FAMILY_DEFAULTS.get(self.family, {}), **given}

    def has(self, name: str) -> bool:
        """Return whether config.json has this field with a value that is not null."""
        return self._members.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the value of a config.json field without conversion, or None if it is absent."""
        return self._members.get(name)

    def require(self, *names: str) -> None:
        """Check that config.json has all of these fields.

        Raises ConfigError with the missing names.
        """
        if missing := [name for name in names if not self.has(name)]:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")

    def require_one(self, *names: str) -> None:
        """Raise ConfigError if config.json has none of these fields."""
        if not any(map(self.has, names)):
            raise ConfigError(f"config.json lacks {names[0]} (or {' or '.join(names[1:])})")

    def count(self, name: str) -> int:
        """Return the value of a config.json field as an integer.

        Raises ConfigError if it is not a positive integer.
        """
        value = self._members.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_COUNT:
            raise ConfigError(f"config.json: {name} must be a positive integer, not {value!r}")
        return value

    def optional(self, name: str, default: int) -> int:
        """Return a config.json field as a positive integer, or `default` if it is absent, null
        or 0.
        """
        return self.count(name) if self._members.get(name) else default

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a config.json field as a boolean, or `default` if it is absent."""
        return bool(self._members.get(name, default))

    @property
    def is_tied(self) -> bool:
        return self.flag("tie_word_embeddings", self.family.startswith("gemma"))

    @property
    def intermediate(self) -> int:
        names = ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size")
        return next(
            (self.count(name) for name in names if self.has(name)),
            self.optional("moe_intermediate_size", 0),
        )

    @property
    def experts(self) -> int:
        """Return the number of routed experts per layer; 0 for a dense model."""
        names = ("n_routed_experts", "num_local_experts", "num_experts")
        return next((self.count(name) for name in names if self._members.get(name)), 0)

    @property
    def max_context(self) -> int:
        """Return the maximum number of tokens of a prompt and its answer together."""
        return self.optional("max_position_embeddings", 131_072)

    def weight_bytes(self) -> tuple[float, str]:
        """Return the bytes per quantised parameter, and which parameters are quantised.

        The second value is "experts" if only the experts are quantised, otherwise "".
        """
        quantised = self._members.get("quantization_config")
        if not isinstance(quantised, dict):
            wide = str(self._members.get("torch_dtype", self._members.get("dtype")))
            return (4.0 if wide == "float32" else 2.0), ""
        method = str(quantised.get("quant_method", ""))
        if method == "mxfp4":
            return 0.5 + 1 / 32, "experts"
        bits = _bits(quantised)
        if bits is None and "fp8" not in method:
            raise ConfigError(
                f"config.json: unknown quant_method {method!r}; known are fp8, mxfp4, and methods "
                "with bits or num_bits"
            )
        return (1.0 if bits is None else bits / 8), ""


def _bits(quantised: Any) -> int | None:
    # Return the first `bits` or `num_bits` in a quantisation section, up to 4 levels deep, or None.
    pending = [(quantised, 0)]
    while pending:
        section, depth = pending.pop(0)
        for key in ("bits", "num_bits"):
            value = section.get(key)
            if isinstance(value, int) and 1 <= value <= 16:
                return value
        if depth < 4:
            pending += [(part, depth + 1) for part in section.values() if isinstance(part, dict)]
    return None
