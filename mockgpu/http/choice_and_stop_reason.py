"""One generated answer of a request (a choice): its text, its finish reason and its scheduler job.

A request with `n: 2` has two choices. The text is generated before the engine's first step, and is
cut at a stop string. If a later check finds that the prompt's KV cache is wrong, another text of
the same length replaces it. The wire format is in openai_format.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_64_intdigest

from mockgpu.json_for_schema import JsonFrame
from mockgpu.mock_tokenizer import (
    TOKEN_BYTES,
    GeneratedText,
    block_keys,
    generate,
    salt_keys,
    token_count,
    variation,
)
from mockgpu.request_parser import ParsedRequest
from mockgpu.scheduler import Job
from mockgpu.split_legs import DecodeLeg, PrefillLeg

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.kv_bytes import Words


class Choice(msgspec.Struct, eq=False):
    """One generated answer, and the scheduler job that computes it.

    text    the text that the client receives, cut at a stop string
    keys    one key per full KV block of prompt and answer, without the request's cache salt
    vary    number that selects this answer among the possible answers to the prompt
    frame   JSON text around the answer if the request demands JSON; None: plain text
    """

    index: int
    prompt: bytes
    tokens: bytes
    text: str
    finish_reason: str
    stop_reason: str | None
    job: Job
    keys: list[int]
    vary: int
    salt: str
    prompt_states: Words | None = None
    frame: JsonFrame | None = None

    @property
    def whole_text(self) -> str:
        """Return the complete answer. If the request demands JSON, the text is wrapped in JSON."""
        return self.text if self.frame is None else self.frame.before + self.text + self.frame.after

    def piece(self, number: int) -> str:
        """Return the text of token `number` of the answer; the first token is 0.

        If the request demands JSON, the first and the last piece include the JSON around the text.
        """
        piece = self.text[number * TOKEN_BYTES : (number + 1) * TOKEN_BYTES]
        if self.frame is None:
            return piece
        before = self.frame.before if number == 0 else ""
        return before + piece + (self.frame.after if number == self.output_tokens - 1 else "")

    def token(self, number: int) -> bytes:
        """Return the text of the answer's token `number`, as bytes; the first token is 0."""
        return self.tokens[number * TOKEN_BYTES : (number + 1) * TOKEN_BYTES]

    @property
    def output_tokens(self) -> int:
        """Return the number of generated tokens, including the tokens of a stop string."""
        return token_count(self.tokens)

    def states(self, start: int, end: int) -> Words:
        """Return the simulated KV of tokens [start, end) of the prompt and answer.

        There is one 64-bit word per token. mockgpu/kv_bytes.py explains the words.
        """
        from mockgpu.kv_bytes import token_states

        if self.prompt_states is None:
            self.prompt_states = token_states(self.prompt, self.keys)
        prompt_tokens = len(self.prompt_states)
        if end <= prompt_tokens:
            return self.prompt_states[start:end]
        return token_states(self.prompt + self.tokens, self.keys)[start:end]

    def replace_text(self, taint: int) -> None:
        """Replace the answer by another one with as many tokens, because the prompt's KV is wrong.

        A real model would also generate other tokens from wrong KV. `taint` is a digest of the
        wrong KV, so the same error always leads to the same answer.
        """
        given_tokens = self.job.leg.first if isinstance(self.job.leg, DecodeLeg) else b""
        context = self.prompt + given_tokens
        speech = generate(
            context,
            block_keys(context),
            self.output_tokens - token_count(given_tokens),
            False,
            self.vary ^ taint,
        )
        self.tokens = given_tokens + speech.tokens
        self.text = self.tokens.decode("utf-8", "replace")[: len(self.text)]
        self.keys = speech.keys
        self.job.keys = salt_keys(speech.keys, self.salt)
        if self.job.tokens:
            self.describe_job()

    def describe_job(self) -> None:
        """Set the job's tokens and cache salt, which KV events must contain."""
        self.job.tokens, self.job.salt = self.prompt + self.tokens, self.salt


def build_choices(parsed: ParsedRequest) -> list[Choice]:
    """Build `n` choices for each prompt of a request, in the order of the prompts."""
    choices: list[Choice] = []
    for first, prompt in zip(
        range(0, len(parsed.prompts) * parsed.n, parsed.n), parsed.prompts, strict=True
    ):
        keys = block_keys(prompt)
        choices.extend(_choice(parsed, prompt, keys, first + i, i) for i in range(parsed.n))
    return choices


def _choice(
    parsed: ParsedRequest, prompt: bytes, prompt_keys: Sequence[int], index: int, variant: int
) -> Choice:
    vary = variation(parsed.body.seed, variant) ^ _noise(prompt, parsed.answer_noise)
    speech = _generate(parsed, prompt, prompt_keys, vary)
    tokens, text, stop = speech.tokens, speech.text, None
    match = _first_stop(text, parsed.stops, parsed.body.min_tokens)
    if match is not None:
        position, stop = match
        end = position + len(stop)
        tokens = tokens[: -(-end // TOKEN_BYTES) * TOKEN_BYTES]
        text = text[: end if parsed.body.include_stop_str_in_output else position]
    reason = "stop" if stop is not None or speech.has_ended else "length"
    frame = parsed.form.frame
    if frame is not None:
        reason = "stop" if parsed.tool is None else "tool_calls"
        text = text if frame.has_words else ""
    if parsed.echoes_only:
        text = ""
    salt = parsed.body.cache_salt or ""
    keep = isinstance(parsed.leg, PrefillLeg) and (
        parsed.leg.if_ended or not (stop is not None or speech.has_ended)
    )
    job = Job(
        token_count(prompt),
        token_count(tokens),
        salt_keys(speech.keys, salt),
        leg=parsed.leg,
        keeps_blocks=keep,
    )
    rest = (speech.keys, vary, salt)
    return Choice(index, prompt, tokens, text, reason, stop, job, *rest, frame=frame)


def _noise(prompt: bytes, share: float) -> int:
    # Return 1 for a share of all prompts, always the same ones, whose answers are to differ.
    return int(bool(share) and xxh3_64_intdigest(prompt, 1) < share * (1 << 64))


def _generate(
    parsed: ParsedRequest, prompt: bytes, prompt_keys: Sequence[int], vary: int
) -> GeneratedText:
    # Generate the answer, starting with the tokens that a prefill group has already made.
    given_bytes = parsed.leg.first if isinstance(parsed.leg, DecodeLeg) else b""
    if not given_bytes:
        return generate(
            prompt, prompt_keys, parsed.limit, parsed.can_end, vary, parsed.body.min_tokens
        )
    context, given_tokens = prompt + given_bytes, token_count(given_bytes)
    least = max(1, parsed.body.min_tokens - given_tokens)
    remaining = generate(
        context, block_keys(context), parsed.limit - given_tokens, parsed.can_end, vary, least
    )
    return GeneratedText(given_bytes + remaining.tokens, remaining.keys, remaining.has_ended)


def _first_stop(text: str, stops: Sequence[str], min_tokens: int) -> tuple[int, str] | None:
    # Return the position and the text of the first stop string in a text, or None.
    #
    # A stop string must end after the first `min_tokens` tokens.
    starts = [max(0, min_tokens * TOKEN_BYTES - len(stop) + 1) for stop in stops]
    matches = [
        (position, stop)
        for stop, start in zip(stops, starts, strict=True)
        if (position := text.find(stop, start)) >= 0
    ]
    return min(matches) if matches else None
