"""One choice of an answer: what it says, cut at stop strings, and why it ends. Known whole before the first step runs.

Bytes on the wire are dialect.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mockgpu.ask import Ask
from mockgpu.job import Job
from mockgpu.text import TOKEN_BYTES, block_keys, salted, speak, token_count, variation


class Choice(msgspec.Struct, frozen=True, eq=False):
    """A choice and the job that computes it. `text` is what the client sees, cut at a stop string."""

    index: int
    prompt: bytes
    tokens: bytes
    text: str
    finish_reason: str
    stop_reason: str | None
    job: Job

    @property
    def output_tokens(self) -> int:
        """Tokens generated, those of a stop string included."""
        return token_count(self.tokens)


def choices_of(ask: Ask) -> list[Choice]:
    """All choices of a request: `n` of each prompt, prompt by prompt."""
    made: list[Choice] = []
    for first, prompt in zip(range(0, len(ask.prompts) * ask.n, ask.n), ask.prompts, strict=True):
        keys = block_keys(prompt)
        made.extend(_choice(ask, prompt, keys, first + i, i) for i in range(ask.n))
    return made


def _choice(ask: Ask, prompt: bytes, prompt_keys: Sequence[int], index: int, variant: int) -> Choice:
    vary = variation(ask.body.seed, variant)
    speech = speak(prompt, prompt_keys, ask.limit, ask.may_end, vary, ask.body.min_tokens)
    tokens, text, stop = speech.tokens, speech.text, None
    found = _first_stop(text, ask.stops, ask.body.min_tokens)
    if found is not None:
        at, stop = found
        end = at + len(stop)
        tokens = tokens[: -(-end // TOKEN_BYTES) * TOKEN_BYTES]
        text = text[: end if ask.body.include_stop_str_in_output else at]
    reason = "stop" if stop is not None or speech.ended else "length"
    if ask.tool is not None:
        reason = "tool_calls"
    keys = salted(speech.keys, ask.body.cache_salt or "")
    job = Job(token_count(prompt), token_count(tokens), keys)
    return Choice(index, prompt, tokens, text, reason, stop, job)


def _first_stop(text: str, stops: Sequence[str], min_tokens: int) -> tuple[int, str] | None:
    """Where the first stop string stands that ends after the minimum, and which it is."""
    begin = [max(0, min_tokens * TOKEN_BYTES - len(stop) + 1) for stop in stops]
    found = [(at, stop) for stop, start in zip(stops, begin, strict=True) if (at := text.find(stop, start)) >= 0]
    return min(found) if found else None
