"""TensorRT-LLM, context first: the context server computes and gives the first token, generation goes on.

Its request models refuse unknown members, so only those it knows are sent. When the context server's token was already
the end, its answer is the whole answer. Source: engines.md E.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvtransfer.dialects.contract import (
    NULL,
    Answer,
    Dialect,
    Edits,
    Finished,
    Handover,
    Order,
    Terms,
    Unusable,
    is_null,
    json_of,
    members,
)

_BOTH = frozenset(
    (
        *(
            "model",
            "stream",
            "stream_options",
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "n",
            "best_of",
        ),
        *(
            "stop",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "user",
        ),
        *(
            "length_penalty",
            "early_stopping",
            "stop_token_ids",
            "include_stop_str_in_output",
            "ignore_eos",
        ),
        *(
            "min_tokens",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "truncate_prompt_tokens",
        ),
        *("response_format", "add_special_tokens"),
    )
)
CHAT = _BOTH | {
    *(
        "messages",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "add_generation_prompt",
    ),
    *(
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "reasoning_effort",
    ),
}
COMPLETIONS = _BOTH | {"prompt", "echo", "suffix", "logprobs", "detokenize"}
"""What the two request models know, as far as a client may use it.

Left out: `prompt_token_ids`, which is computed in place of the prompt that was counted and admitted; the logits of
context and generation, a vocabulary of floats per token; `lora_request`, which names a path on the engine's disk.
"""

UNFINISHED = ("length", "not_finished")


class _Params(msgspec.Struct, frozen=True):
    ctx_request_id: Annotated[int, msgspec.Meta(ge=0)]
    disagg_request_id: Annotated[int, msgspec.Meta(ge=0)]


class _Usage(msgspec.Struct, frozen=True):
    """The answer's counts as they came, which nobody else hands on."""

    usage: msgspec.Raw = NULL


_params = msgspec.json.Decoder(_Params).decode
_usage = msgspec.json.Decoder(_Usage).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_tokens = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]).decode
_any = msgspec.json.Decoder(dict[str, Any]).decode


def prefill(terms: Terms) -> Edits:
    """The original as far as TensorRT-LLM knows it, for context only. max_tokens stays as it is."""
    params = {"request_type": "context_only", "disagg_request_id": terms.number}
    return Edits(
        members({"disaggregated_params": json_of(params), "stream": b"false"}),
        frozenset({"stream", "stream_options"}),
        CHAT if terms.chat else COMPLETIONS,
    )


def decode(terms: Terms, answer: Answer | None) -> Handover | Unusable | Finished:
    """The original with the context server's object and its tokens; or its answer, when that is the end of it."""
    if answer is None:
        return Unusable("there is no context answer")
    if answer.finish_reason not in UNFINISHED:
        return (
            _finished(answer)
            if answer.finish_reason
            else Unusable("the context answer gives no finish reason")
        )
    try:
        told = _params(answer.disaggregated)
        handed = _members(answer.disaggregated)
        tokens = _tokens(answer.prompt_token_ids)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return Unusable(f"the context answer: {error}"[:200])
    if told.disagg_request_id != terms.number or not tokens:
        return Unusable(
            "the context answer is another request's"
            if tokens
            else "the context answer names no tokens"
        )
    handed["request_type"] = msgspec.Raw(b'"generation_only"')
    usage = _usage(answer.body).usage
    if not is_null(usage):
        handed["ctx_usage"] = usage
    prompt = "prompt_token_ids" if terms.chat else "prompt"
    put = members({"disaggregated_params": json_of(handed), prompt: bytes(answer.prompt_token_ids)})
    return Handover(Edits(put, frozenset({prompt}), CHAT if terms.chat else COMPLETIONS))


def _finished(answer: Answer) -> Finished | Unusable:
    """The answer as the client may see it: without the object and the tokens that were meant for the gateway."""
    try:
        whole = _any(answer.body)
    except msgspec.DecodeError as error:  # a number that nothing can hold is only found here
        return Unusable(f"the context answer: {error}"[:200])
    whole.pop("prompt_token_ids", None)
    for choice in whole["choices"]:
        choice.pop("disaggregated_params", None)
    return Finished(json_of(whole))


TRTLLM = Dialect("trtllm", "trtllm", Order.SEQUENTIAL, prefill, decode)
