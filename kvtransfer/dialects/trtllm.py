"""The KV handoff protocol of TensorRT-LLM, as the gateway uses it.

A context server computes the prompt and one token; then a generation server decodes. These servers
refuse unknown JSON members, so only known ones are sent. If the first token ends the answer, the
context server's response is the complete answer. Source: tensorrt_llm/serve.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvtransfer.dialects.dialect import (
    NULL,
    DecodeRequest,
    Dialect,
    FinishedResponse,
    HandoffTerms,
    LegOrder,
    PrefillResponse,
    RequestEdits,
    UnusableResponse,
    encode_json,
    encode_members,
    is_null,
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
"""The members of TensorRT-LLM's two request models that a client may use.

These members are excluded:

prompt_token_ids  would replace the prompt that was counted and admitted
context and generation logits  are a vocabulary of floats per token
lora_request  names a path on the engine's disk
"""

UNFINISHED = ("length", "not_finished")


class _Params(msgspec.Struct, frozen=True):
    ctx_request_id: Annotated[int, msgspec.Meta(ge=0)]
    disagg_request_id: Annotated[int, msgspec.Meta(ge=0)]


class _Usage(msgspec.Struct, frozen=True):
    # The raw usage in a context server's response, which the decode request must contain.

    usage: msgspec.Raw = NULL


_params = msgspec.json.Decoder(_Params).decode
_usage = msgspec.json.Decoder(_Usage).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_tokens = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]).decode
_any = msgspec.json.Decoder(dict[str, Any]).decode


def prefill(terms: HandoffTerms) -> RequestEdits:
    """Return the edits of the prefill request, which TensorRT-LLM calls context-only.

    Members that TensorRT-LLM does not know are removed. max_tokens stays unchanged.
    """
    params = {"request_type": "context_only", "disagg_request_id": terms.number}
    return RequestEdits(
        encode_members({"disaggregated_params": encode_json(params), "stream": b"false"}),
        frozenset({"stream", "stream_options"}),
        CHAT if terms.chat else COMPLETIONS,
    )


def decode(
    terms: HandoffTerms, answer: PrefillResponse | None
) -> DecodeRequest | UnusableResponse | FinishedResponse:
    """Return the decode request, with the prompt's tokens and the parameters from the prefill
    response.

    Returns a FinishedResponse if the prefill response is already the complete answer.
    """
    if answer is None:
        return UnusableResponse("there is no answer of the context (prefill) server")
    if answer.finish_reason not in UNFINISHED:
        return (
            _finished(answer)
            if answer.finish_reason
            else UnusableResponse("the context (prefill) server's answer gives no finish reason")
        )
    try:
        params = _params(answer.disaggregated)
        handoff = _members(answer.disaggregated)
        tokens = _tokens(answer.prompt_token_ids)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return UnusableResponse(f"the context (prefill) server's answer is invalid: {error}"[:200])
    if params.disagg_request_id != terms.number or not tokens:
        return UnusableResponse(
            "the context (prefill) server's answer belongs to another request"
            if tokens
            else "the context (prefill) server's answer has no prompt tokens"
        )
    handoff["request_type"] = msgspec.Raw(b'"generation_only"')
    usage = _usage(answer.body).usage
    if not is_null(usage):
        handoff["ctx_usage"] = usage
    prompt = "prompt_token_ids" if terms.chat else "prompt"
    put = encode_members(
        {"disaggregated_params": encode_json(handoff), prompt: bytes(answer.prompt_token_ids)}
    )
    return DecodeRequest(
        RequestEdits(put, frozenset({prompt}), CHAT if terms.chat else COMPLETIONS)
    )


def _finished(answer: PrefillResponse) -> FinishedResponse | UnusableResponse:
    # Return the context response without the members that were meant for the gateway.
    try:
        response = _any(answer.body)
    except msgspec.DecodeError as error:
        # A number out of range is only detected here.
        return UnusableResponse(f"the context (prefill) server's answer is invalid: {error}"[:200])
    response.pop("prompt_token_ids", None)
    for choice in response["choices"]:
        choice.pop("disaggregated_params", None)
    return FinishedResponse(encode_json(response))


TRTLLM = Dialect("trtllm", "trtllm", LegOrder.SEQUENTIAL, prefill, decode)
