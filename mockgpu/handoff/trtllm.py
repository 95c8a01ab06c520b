"""The mock engine's side of split requests as TensorRT-LLM serves them, "context first".

- The context (prefill) server generates the first token. It returns the token in its choice, with
  an opaque state.
- The generation (decode) server sends that token to the client and continues.
- Request models forbid unknown fields.

The order "generation first" is not modelled. Source: tensorrt_llm/serve; field names: its
openai_protocol.py.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from mockgpu.handoff.interfaces import EngineIdentity
from mockgpu.mock_tokenizer import is_generated, token_bytes, token_ids
from mockgpu.request_parser import (
    NO_LEG,
    ApiError,
    MalformedHandoffError,
    ParsedHandoff,
    ParsedRequest,
    RequestBody,
    TokenId,
)
from mockgpu.split_legs import AgentPeer, DecodeLeg, OfferedKv, PrefillLeg

FIELD = "disaggregated_params"
HOLD_S = 180.0
# The smallest request id of an orchestrator. The server itself assigns smaller ids.
LEAST_ID = 1 << 40
MOST_IDS = 1 << 16

_SHARED = (
    *(
        "model",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "seed",
    ),
    *(
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "user",
        "best_of",
        "use_beam_search",
    ),
    *("top_k", "top_p_min", "min_p", "repetition_penalty", "length_penalty", "early_stopping"),
    *(
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
    ),
    *(
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "lora_request",
        "add_special_tokens",
    ),
    *(
        "response_format",
        "echo",
        "suffix",
        "prompt_ignore_length",
        "thinking_token_budget",
        "priority",
    ),
    *("disaggregated_params", "conversation_params"),
)
CHAT_FIELDS = frozenset(
    (
        *_SHARED,
        *(
            "messages",
            "max_completion_tokens",
            "top_logprobs",
            "tools",
            "tool_choice",
            "reasoning_effort",
        ),
        *("add_generation_prompt", "documents", "chat_template", "chat_template_kwargs"),
        *(
            "injected_chat_template_kwargs",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "prompt_token_ids",
        ),
        *("cache_salt", "agent_hierarchy"),
    )
)
COMPLETION_FIELDS = frozenset((*_SHARED, "prompt", "detokenize", "return_context_logits"))


class Details(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON object `prompt_tokens_details` in the usage of a TensorRT-LLM response."""

    cached_tokens: int = 0


class ContextUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TensorRT-LLM's object `ctx_usage`: the usage that the context (prefill) server reported."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: Details | None = None


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON object `disaggregated_params`, with which TensorRT-LLM controls a split request."""

    request_type: str
    disagg_request_id: int | None = None
    ctx_request_id: int | None = None
    first_gen_tokens: list[TokenId] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    encoded_opaque_state: str | None = None
    draft_tokens: list[int] | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: ContextUsage | None = None
    return_prompt_token_ids_b64: bool = False
    resolved_thinking: bool | None = None


class OpaqueState(msgspec.Struct, frozen=True, array_like=True):
    """The content of TensorRT-LLM's opaque state: where the KV is, and permission to fetch it."""

    address: str
    name: str
    ticket: str


class TrtllmDialect:
    """TensorRT-LLM's protocol for split requests, as an EngineDialect.

    It remembers the request ids it has seen, because each may be used only once.
    """

    name = "trtllm"

    def __init__(self) -> None:
        self._used_ids: OrderedDict[tuple[str, int], None] = OrderedDict()

    def read(
        self,
        raw: bytes,
        body: RequestBody,
        headers: Mapping[str, str],
        request_id: str,
        identity: EngineIdentity,
    ) -> ParsedHandoff:
        """Parse the handoff fields of a TensorRT-LLM request.

        Raises ApiError 400 for unknown fields.
        """
        known = CHAT_FIELDS if body.messages is not None else COMPLETION_FIELDS
        for field in msgspec.json.decode(raw):
            if field not in known:
                raise ApiError(
                    400, f"1 validation error: {field}: Extra inputs are not permitted", field
                )
        if body.disaggregated_params is None:
            return NO_LEG
        params = self._params(body.disaggregated_params)
        if params.request_type == "context_and_generation":
            return NO_LEG
        if params.request_type == "context_only":
            return ParsedHandoff(
                PrefillLeg(str(self._new_id(params)), identity.wait_s, if_ended=False),
                one_token=True,
            )
        return ParsedHandoff(
            self._take(params, identity),
            token_bytes(body.prompt_token_ids) if body.prompt_token_ids else None,
        )

    def _params(self, value: Any) -> Params:
        try:
            params = msgspec.convert(value, Params)
        except msgspec.ValidationError as error:
            raise MalformedHandoffError(f"{FIELD}: {error}", status=400) from None
        if params.request_type not in ("context_only", "generation_only", "context_and_generation"):
            raise MalformedHandoffError(
                f"{FIELD}.request_type must be context_only, generation_only or "
                f"context_and_generation, not {params.request_type!r}",
                status=400,
            )
        if params.schedule_style:
            raise MalformedHandoffError(
                f"{FIELD}.schedule_style must be 0 or absent (context first), not "
                f"{params.schedule_style!r}",
                status=400,
            )
        return params

    def _new_id(self, params: Params) -> int:
        # Return the request id that the router has chosen.
        #
        # Raises MalformedHandoffError if it is missing, out of range, or was used before by the
        # same kind of request.
        number = params.disagg_request_id
        if (
            number is None
            or not LEAST_ID <= number < 1 << 63
            or (params.request_type, number) in self._used_ids
        ):
            raise MalformedHandoffError(
                f"{FIELD}.disagg_request_id must be a new integer from {LEAST_ID} to 2^63 - 1, "
                f"not {number}",
                status=400,
            )
        self._used_ids[params.request_type, number] = None
        if len(self._used_ids) > MOST_IDS:
            self._used_ids.popitem(last=False)
        return number

    def _take(self, params: Params, identity: EngineIdentity) -> DecodeLeg:
        self._new_id(params)
        first = token_bytes(params.first_gen_tokens or ())
        if params.ctx_request_id is None or not first or not is_generated(first):
            raise MalformedHandoffError(
                f"{FIELD} lacks ctx_request_id or generated tokens", status=400
            )
        try:
            state = msgspec.json.decode(
                base64.b64decode(params.encoded_opaque_state or "", validate=True), type=OpaqueState
            )
        except (ValueError, msgspec.DecodeError):
            raise MalformedHandoffError(
                f"{FIELD}.encoded_opaque_state is malformed", status=400
            ) from None
        if state.address == identity.address:
            raise MalformedHandoffError(
                f"the context and the generation server are the same engine, {identity.address}",
                status=400,
            )
        details = params.ctx_usage.prompt_tokens_details if params.ctx_usage is not None else None
        return DecodeLeg(
            name=state.name,
            peer=AgentPeer(state.address),
            wait_s=identity.wait_s,
            ticket=state.ticket,
            first=first,
            cached=details.cached_tokens if details is not None else None,
        )

    def response_members(
        self,
        parsed: ParsedRequest,
        leg: PrefillLeg,
        offered: OfferedKv | None,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return the token ids of the prompt, as the context (prefill) server rendered it.

        The generation (decode) server needs them, because it does not render the chat itself.
        """
        return {"prompt_token_ids": token_ids(parsed.prompts[0])}

    def choice_members(
        self,
        parsed: ParsedRequest,
        offered: OfferedKv | None,
        first: bytes,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return the parameters that the generation (decode) server needs, for the prefill
        response.

        They are null if the answer already ended with the first token.
        """
        if offered is None:
            return {FIELD: None}
        state = OpaqueState(identity.address, offered.name, offered.ticket)
        cut = parsed.body.max_tokens == 1 or parsed.body.max_completion_tokens == 1
        return {
            "finish_reason": "length" if cut else "not_finished",
            FIELD: {
                "request_type": "context_only",
                "disagg_request_id": int(offered.name),
                "ctx_request_id": int(offered.name),
                "first_gen_tokens": token_ids(first),
                "encoded_opaque_state": base64.b64encode(msgspec.json.encode(state)).decode(),
                "ctx_dp_rank": 0,
                "ctx_info_endpoint": None,
                "draft_tokens": None,
            },
        }
