"""Converts objects of vLLM (requests, steps, settings) to the values that the KV connector needs.

The rest of the connector then depends on no attribute of vLLM's requests. All functions rely on
vLLM 0.32.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import vllm
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from kvtransfer.engines.vllm.block_report import PoolState
from kvtransfer.engines.vllm.handoff_scheduler import PromptRequest
from kvtransfer.engines.vllm.store_scheduler import StoredRequest
from kvtransfer.engines.vllm.unfinished_prompts import PromptChunk
from kvtransfer.engines.vllm.weights_identity import identify_weights


def pool_state(pool: Any) -> PoolState:
    """Return which blocks vLLM's block pool has cached, and how many blocks are free."""
    keys = [block.block_hash for block in pool.blocks]
    names = [maybe_convert_block_hash(get_block_hash(key)) for key in keys if key is not None]
    cached = [name if isinstance(name, int) else name.hex() for name in names]
    return PoolState(cached, pool.get_num_free_blocks())


def _variant(request: Any) -> str:
    # Return what changes a request's KV other than its tokens: the adapter, and its images.
    lora = request.lora_request.lora_name if request.lora_request else ""
    images = [str(feature.identifier) for feature in request.mm_features or ()]
    return "\0".join((lora, *images)) if lora or images else ""


def prompt_request(request: Any) -> PromptRequest:
    """Return a request of vLLM's scheduler in the form that KV handoffs need."""
    params = request.kv_transfer_params
    return PromptRequest(
        request.request_id,
        request.prompt_token_ids or (),
        params if isinstance(params, dict) else {},
        _variant(request),
    )


def stored_request(request: Any) -> StoredRequest | None:
    """Return a request of vLLM's scheduler in the form that the KV store needs.

    The result is None for a prompt of embeddings, which has no tokens.
    """
    if request.prompt_embeds is not None:
        return None
    tokens = np.array(list(request.all_token_ids), "<u4").tobytes()
    salt = request.cache_salt or ""
    return StoredRequest(request.request_id, tokens, salt, _variant(request))


def prompt_chunks(output: Any) -> list[PromptChunk]:
    """Return which tokens of each request a step computes, from vLLM's SchedulerOutput."""
    cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {request.req_id: request.num_computed_tokens for request in new}
    prompts = {request.req_id: len(request.prompt_token_ids or ()) for request in new}
    return [
        PromptChunk(request, computed.get(request, 0), count, prompts.get(request, 0))
        for request, count in output.num_scheduled_tokens.items()
    ]


def weights_identity(config: Any) -> str:
    """Return a hash of the settings that decide an engine's weights.

    Stored KV is used only by engines with the same hash.
    """
    model, load = config.model_config, config.load_config
    commit = getattr(model.hf_config, "_commit_hash", None)
    facts = (model.revision, commit, str(load.load_format), model.seed)
    return identify_weights(model.model, facts)


def engine_family(config: Any) -> str:
    """Return a text that is equal only for engines which can use each other's KV.

    It consists of vLLM's version and a hash of the model, its data types and its quantisation.
    """
    model, cache = config.model_config, config.cache_config
    text = repr(
        (
            model.hf_config.to_json_string(),
            str(model.dtype),
            model.quantization,
            cache.cache_dtype,
            model.revision,
        )
    )
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"vllm-{vllm.__version__.rpartition('.')[0]}-{digest}"
