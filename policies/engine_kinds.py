"""The APIs and features of each kind of engine, as one table.

The facts about vLLM, llama.cpp and `transformers serve` were observed on running engines. Those
about SGLang and TensorRT-LLM come from their sources, and those about Text Generation Inference
(TGI) and Ollama from their documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from policies.routing_types import EngineKind

MODELS_PATH = "/v1/models"
_TOKENS = frozenset({"/tokenize", "/detokenize"})
_MESSAGES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
_RESPONSES = frozenset({"/v1/responses", "/v1/responses/input_tokens"})


class EngineTraits(msgspec.Struct, frozen=True):
    """The APIs and features of one kind of engine beyond the OpenAI-compatible APIs.

    health_path    page that returns status 200 if the engine is healthy; empty: use the configured
                   `health.path`
    metrics_path   page with Prometheus metrics; empty: there is none
    metric_prefix  prefix of the names of the engine's own metrics; empty: there is none
    salt_member    JSON field of a request that contains a cache salt; empty: the engine has no
                   salts
    lacked_paths   API paths that the engine does not serve, or serves with another meaning
    is_low_first   whether a lower number in a request's `priority` is more urgent
    can_continue   whether the engine can continue an answer, given the ids of its tokens
    takes_rank     whether the header x-data-parallel-rank chooses a data-parallel rank
    has_kv_events  whether the engine can publish KV events
    least_probe_s  minimum seconds between two health checks of an endpoint
    can_be_asked   whether a health check may request a token while other requests run. False for
                   engines with few slots, or that load a model first: the request would wait
                   although the engine is healthy
    """

    health_path: str = ""
    metrics_path: str = ""
    metric_prefix: bytes = b""
    salt_member: str = ""
    lacked_paths: frozenset[str] = frozenset()
    is_low_first: bool = False
    can_continue: bool = False
    takes_rank: bool = False
    has_kv_events: bool = False
    least_probe_s: float = 0.0
    can_be_asked: bool = True


ENGINE_TRAITS: Mapping[str, EngineTraits] = MappingProxyType(
    {
        EngineKind.VLLM: EngineTraits(
            metrics_path="/metrics",
            metric_prefix=b"vllm:",
            salt_member="cache_salt",
            is_low_first=True,
            can_continue=True,
            takes_rank=True,
            has_kv_events=True,
        ),
        EngineKind.SGLANG: EngineTraits(
            metrics_path="/metrics",
            metric_prefix=b"sglang:",
            salt_member="extra_key",
            takes_rank=True,
            has_kv_events=True,
        ),
        # TensorRT-LLM's chats take a cache salt, but its completions refuse unknown members.
        EngineKind.TRTLLM: EngineTraits(
            metrics_path="/prometheus/metrics", metric_prefix=b"trtllm_"
        ),
        # llama.cpp's /tokenize reads the text from the member `content`; a request with another
        # member gets an empty list.
        EngineKind.LLAMACPP: EngineTraits(
            metrics_path="/metrics",
            metric_prefix=b"llamacpp:",
            lacked_paths=_TOKENS,
            can_be_asked=False,
        ),
        EngineKind.TGI: EngineTraits(
            metrics_path="/metrics",
            metric_prefix=b"tgi_",
            lacked_paths=_TOKENS | _MESSAGES | _RESPONSES,
        ),
        EngineKind.OLLAMA: EngineTraits(health_path="/api/version", can_be_asked=False),
        EngineKind.TRANSFORMERS: EngineTraits(can_be_asked=False),
        # A provider counts requests, and all that most providers have in common is the list of
        # models and chat completions. `native_apis` of a pool says what else its endpoints serve.
        EngineKind.OPENAI: EngineTraits(
            health_path=MODELS_PATH,
            least_probe_s=10.0,
            lacked_paths=_TOKENS | _MESSAGES | _RESPONSES,
            can_be_asked=False,
        ),
    }
)
