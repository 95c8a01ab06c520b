"""Typed access to the fields of a config.json, with errors that state what is valid."""

from __future__ import annotations

import re
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

# Families whose output head is the embedding unless the file says otherwise. Source: the classes of
# transformers and of vLLM for these families.
_TIED = re.compile(r"(gemma|cohere|lfm2).*|falcon|starcoder2")

# Members under which a multimodal configuration describes its language model.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")

_LETTERS = MappingProxyType({"mamba": "M", "linear_attention": "M", "moe": "E", "mlp": "-"})

_ENCODERS = frozenset(
    {
        *("albert", "bart", "bert", "clip", "deberta", "deberta-v2", "distilbert", "electra"),
        *("modernbert", "mpnet", "mt5", "nomic_bert", "roberta", "t5", "whisper", "xlm-roberta"),
    }
)


class ConfigError(ValueError):
    """Raised if a model's config.json does not describe a decoder that the sizing supports."""


def language_model(config: Any) -> dict[str, Any]:
    """Return the fields of the language model that a config.json describes.

    A multimodal model has its language model in a section; the section's fields replace outer ones
    of the same name. Raises ConfigError if the file is not a JSON object.
    """
    if not isinstance(config, dict):
        raise ConfigError(
            "config.json must contain a JSON object, the configuration of a Hugging Face model"
        )
    for name in _NESTED:
        if isinstance(config.get(name), dict):
            outer = {key: value for key, value in config.items() if key != name}
            return language_model(outer | config[name])
    return config


def _with_pattern(members: dict[str, Any]) -> dict[str, Any]:
    # Return the members of Nemotron-H with its pattern of letters, which newer files list as words.
    kinds = members.get("layers_block_type")
    if members.get("model_type") != "nemotron_h" or not isinstance(kinds, list):
        return members
    letters = "".join(_LETTERS.get(str(kind), "*") for kind in kinds)
    return members | {"hybrid_override_pattern": letters, "num_hidden_layers": len(letters)}


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
        self._members = {**FAMILY_DEFAULTS.get(self.family, {}), **_with_pattern(given)}

    def has(self, name: str) -> bool:
        """Return whether config.json has this field with a value that is not null."""
        return self._members.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the value of a config.json field as it is in the file, or None if it is absent."""
        return self._members.get(name)

    def require(self, *names: str) -> None:
        """Check that config.json has all of these fields.

        Raises ConfigError with the missing names.
        """
        if missing := [name for name in names if not self.has(name)]:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")

    def require_one(self, *names: str) -> None:
        """Raise ConfigError if the model's config.json has none of the fields `names`."""
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

    def first(self, *names: str) -> int | None:
        """Return the first of these config.json fields that the file has, as an integer.

        Returns None if all are absent. If a field has a value per layer, the largest one is
        returned.
        """
        for name in names:
            value = self._members.get(name)
            if isinstance(value, list):
                value = max((each for each in value if isinstance(each, int)), default=None)
            if value == 0 and not isinstance(value, bool):
                return 0
            if value is not None:
                return self.count(name) if not isinstance(self.get(name), list) else value
        return None

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a true or false field of config.json, or `default` if it is absent."""
        return bool(self._members.get(name, default))

    @property
    def is_tied(self) -> bool:
        names = ("tie_word_embeddings", "tie_embedding")
        given = next((self.get(name) for name in names if self.has(name)), None)
        return bool(_TIED.fullmatch(self.family) if given is None else given)

    @property
    def intermediate(self) -> int:
        names = ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "ffn_dim")
        return self.first(*names, "moe_intermediate_size") or 0

    @property
    def max_context(self) -> int:
        """Return the maximum number of tokens of a prompt and its answer together."""
        return self.optional("max_position_embeddings", 131_072)
