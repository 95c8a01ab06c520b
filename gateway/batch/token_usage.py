"""Sums the tokens that the requests of a batch used, from the results in its journal. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec


class TokenUsage(msgspec.Struct, frozen=True):
    """The tokens of all answered requests of a batch, as engines reported them.

    cached_tokens     input tokens that engines had in their caches; part of input_tokens
    reasoning_tokens  output tokens that the model used for reasoning; part of output_tokens
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def as_object(self) -> dict[str, Any]:
        """Return the usage as in a batch object of OpenAI's API."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    # Both the names of chat completions and embeddings, and those of messages and responses.
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body | None = None


class _Line(msgspec.Struct):
    response: _Response | None = None


_decode = msgspec.json.Decoder(_Line).decode


class UsageSum:
    """Adds up the token usage in the lines of a batch's output file."""

    def __init__(self) -> None:
        self._totals = [0, 0, 0, 0]

    def add(self, line: str) -> None:
        """Add the token usage that one line of the output file reports, if it reports any."""
        try:
            response = _decode(line).response
        except (msgspec.DecodeError, RecursionError):
            return
        usage = None if response is None or response.body is None else response.body.usage
        if usage is None:
            return
        cached = usage.prompt_tokens_details or usage.input_tokens_details
        reasoning = usage.completion_tokens_details or usage.output_tokens_details
        found = (
            usage.prompt_tokens or usage.input_tokens,
            usage.completion_tokens or usage.output_tokens,
            None if cached is None else cached.cached_tokens,
            None if reasoning is None else reasoning.reasoning_tokens,
        )
        self._totals = [
            total + max(0, count or 0) for total, count in zip(self._totals, found, strict=True)
        ]

    @property
    def total(self) -> TokenUsage:
        return TokenUsage(*self._totals)
