"""The routing policies of other routers, each with the nearest policy of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

SESSION_HEADER = "x-session-id"
_SESSIONS = "the session is read from x-session-id or prompt_cache_key; without one any endpoint"


class Counterpart(msgspec.Struct, frozen=True):
    """The gateway's policy that is nearest to a policy of another router.

    policy   name of the gateway's policy
    differs  how the gateway's policy differs from the other router's; "" if it does not
    """

    policy: str
    differs: str = ""


ROUTERS: Mapping[str, Counterpart] = MappingProxyType(
    {
        "round_robin": Counterpart("round_robin"),
        "random": Counterpart("round_robin", "endpoints in turn; there is no random policy"),
        "power_of_two": Counterpart("power_of_two"),
        "cache_aware": Counterpart("sglang_cache_aware"),
        "consistent_hash": Counterpart("consistent_hash", _SESSIONS),
        "consistent_hashing": Counterpart("consistent_hash", _SESSIONS),
        "rendezvous_hash": Counterpart("consistent_hash", _SESSIONS),
        "sticky_round_robin": Counterpart("consistent_hash", _SESSIONS),
        "manual": Counterpart("consistent_hash", f"{_SESSIONS}; nothing is assigned by load"),
        "prefix_hash": Counterpart("prefix_aware", "the whole prefix counts, not a hash of it"),
        "bucket": Counterpart("least_loaded", "by outstanding tokens, not by length of the prompt"),
    }
)
"""Routing policies of vllm-router, sglang-router and SMG, each with its counterpart."""

PRODUCTION_STACK: Mapping[str, Counterpart] = MappingProxyType(
    {
        "roundrobin": Counterpart("round_robin"),
        "session": Counterpart("consistent_hash", _SESSIONS),
        "prefixaware": Counterpart("prefix_aware"),
        "kvaware": Counterpart(
            "prefix_aware", "what engines hold is learned from picks and usage, not from LMCache"
        ),
        "ttft": Counterpart("priced", "the expected TTFT is learned from answers"),
        "priority": Counterpart("least_loaded", "priorities order requests that wait"),
        "disaggregated_prefill": Counterpart("prefix_aware"),
        "disaggregated_prefill_orchestrated": Counterpart("prefix_aware"),
    }
)
"""Values of the vLLM production stack's option --routing-logic, each with its counterpart."""

LITELLM: Mapping[str, Counterpart] = MappingProxyType(
    {
        "simple-shuffle": Counterpart("round_robin", "endpoints in turn, without weights"),
        "least-busy": Counterpart("least_loaded"),
        "usage-based-routing": Counterpart("least_loaded", "by outstanding work, not by rpm, tpm"),
        "usage-based-routing-v2": Counterpart(
            "least_loaded", "by outstanding work, not by rpm and tpm"
        ),
        "latency-based-routing": Counterpart("priced", "by expected latency and harm to others"),
        "cost-based-routing": Counterpart("least_loaded", "endpoints have no costs"),
    }
)
"""Values of LiteLLM's router_settings.routing_strategy, each with its counterpart."""
