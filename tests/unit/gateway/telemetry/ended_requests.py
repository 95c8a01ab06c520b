"""Creates endpoints and ended requests for tests of what the gateway records about requests."""

from __future__ import annotations

from gateway.protocol import api_table
from gateway.protocol.request.api_call import Call
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from policies.endpoint_load import EndpointLoad
from policies.routing_types import Candidate, Endpoint, Request, Slo

SLO = Slo("interactive", 1.0, 0.05, 4.0)


def candidate(slot: int, prefill_tokens: int = 0) -> Candidate:
    built = Candidate(
        Endpoint(f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "main", "demo"), EndpointLoad(slot)
    )
    built.load.prefill_tokens = prefill_tokens
    return built


def exchange(number: int = 1, **request: object) -> Exchange:
    x = Exchange(f"req_{number}", api_table.CHAT, "127.0.0.1", 0.0)
    x.received_at, x.model = 0.0, "demo"
    x.call = Call(
        api_table.CHAT, Request(x.id, "demo", "", 1000, 100, slo=SLO, **request), "demo", b"{}", ()
    )  # type: ignore[arg-type]
    return x


def answered(first_s: float, last_s: float, tokens: int, events: int | None = None) -> Relay:
    relay = Relay(b"")
    relay.first_token_at, relay.last_data_at, relay.is_committed = first_s, last_s, True
    relay.event_count = tokens + 2 if events is None else events
    relay._usage_result = TokenUsage(1000, tokens, 0)
    return relay
