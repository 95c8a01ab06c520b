"""Prompts and answers of a golden comparison, which compares two engines on the same prompts.

They are plain values, converted from and to OpenAI's formats. This module does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from typing import Any

import msgspec

MAX_PROMPTS = 10_000


class GoldenError(ValueError):
    """Raised if answers cannot be compared. The message contains the reason and the place."""


class TokenChoice(msgspec.Struct, frozen=True):
    """One generated token, with the probabilities of the most likely tokens at its position."""

    token: str
    probabilities: Mapping[str, float]


class GoldenAnswer(msgspec.Struct, frozen=True):
    """An engine's answer to one prompt.

    text               the generated text
    calls              tool calls as (name, arguments as text)
    tokens             generated tokens with probabilities; empty: the engine reports none
    error              why there is no answer; empty: there is one
    took_s             seconds from the request to the end of the answer
    completion_tokens  number of generated tokens
    """

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    tokens: tuple[TokenChoice, ...] = ()
    error: str = ""
    took_s: float = 0.0
    completion_tokens: int = 0

    @property
    def whole(self) -> str:
        return "".join([self.text, *(f"\n{name}({given})" for name, given in self.calls)])


def read_prompts(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Parse a JSON Lines file of prompts, and return one request body per line.

    A line is a body with `messages` (a chat) or `prompt` (a completion), such as {"prompt":
    "Hello"}. Raises GoldenError, with the number of the line, if a line is invalid.
    """
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError:
            body = None
        if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
            raise GoldenError(f'line {number} is not a request; valid: {{"messages": [...]}} or '
                              '{"prompt": "..."}')  # fmt: skip
        prompts.append(body)
    if not prompts:
        raise GoldenError("the file contains no prompt; write one JSON request per line")
    if len(prompts) > MAX_PROMPTS:
        raise GoldenError(
            f"the file contains {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed"
        )
    return prompts


def request_of(prompt: Mapping[str, Any], model: str, max_tokens: int, top: int) -> dict[str, Any]:
    """Return the request body for a prompt, with greedy sampling.

    `top` is the number of most likely tokens to request per position, with probabilities; 0: none.
    """
    body = {"temperature": 0, "max_tokens": max_tokens, **prompt, "model": model, "stream": False}
    if top and "messages" in prompt:
        body |= {"logprobs": True, "top_logprobs": top}
    elif top:
        body |= {"logprobs": top}
    return body


# Members of a live request that decide its answer; all others are left out.
MIRRORED_MEMBERS = (
    *("messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("stop", "chat_template_kwargs", "reasoning_effort", "suffix"),
)


def prompt_of(members: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the golden prompt of a live request: only the JSON fields that decide its answer.

    Sampling parameters are removed. The request's own token limit is used if it is below
    `max_tokens`.
    """
    limits = (members.get("max_tokens"), members.get("max_completion_tokens"), max_tokens)
    least = min(limit for limit in limits if isinstance(limit, int) and limit > 0)
    kept = {name: members[name] for name in MIRRORED_MEMBERS if name in members}
    return kept | {"max_tokens": least}


def path_of(prompt: Mapping[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in prompt else "/v1/completions"


def answer_of(body: Any, took_s: float) -> GoldenAnswer:
    try:
        choice = body["choices"][0]
        message = choice.get("message") or {}
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return GoldenAnswer(
            message.get("content") or choice.get("text") or "",
            tuple((str(call["name"]), str(call["arguments"])) for call in calls),
            tuple(_tokens(choice.get("logprobs") or {})),
            took_s=took_s,
            completion_tokens=int((body.get("usage") or {}).get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return GoldenAnswer(error="the response is neither a chat nor a completion", took_s=took_s)


def _tokens(logprobs: Mapping[str, Any]) -> Iterator[TokenChoice]:
    for index in logprobs.get("content") or ():
        tops = index.get("top_logprobs") or ()
        found = {top["token"]: exp(top["logprob"]) for top in tops}
        yield TokenChoice(index["token"], found | {index["token"]: exp(index["logprob"])})
    names, tops = logprobs.get("tokens") or (), logprobs.get("top_logprobs") or ()
    own = logprobs.get("token_logprobs") or ()
    for name, top, logprob in zip(names, tops, own, strict=False):
        found = {token: exp(value) for token, value in (top or {}).items()}
        yield TokenChoice(name, found | ({} if logprob is None else {name: exp(logprob)}))
