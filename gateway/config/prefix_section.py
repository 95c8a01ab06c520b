"""Configuration section for the prefix index: its memory and its block size."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from gateway.config.value_types import Section, Size, setting
from gateway.config.yaml_source import number_if_substituted
from policies.prefix.prefix_index import LEAST_CAP_BYTES


class Prefix(Section):
    """Settings of the prefix index: a record of the prompt prefixes cached at each endpoint."""

    index: Size = setting(
        "256MiB",
        "Memory for the prefix index, a hard limit; when it is full, the oldest entries "
        "are dropped.",
    )
    events: Size = setting(
        "256MiB",
        "Memory, at about 300 bytes per block, for the blocks that engines report in KV events, "
        "and for prompts whose token ids are known. Used only with kv_events.",
    )
    block_bytes: Annotated[
        int,
        Field(strict=True, ge=16, le=65536, multiple_of=8),
        BeforeValidator(number_if_substituted),
    ] = setting(
        512,
        "Bytes of prompt text per block, a multiple of 8. Smaller blocks match prefixes more "
        "exactly and take more memory.",
    )

    @field_validator("index")
    @classmethod
    def _large_enough(cls, index: int) -> int:
        if index < LEAST_CAP_BYTES:
            raise ValueError(
                "the size is too small for a prefix index; it must be at least "
                f"{LEAST_CAP_BYTES >> 10}KiB"
            )
        return index
