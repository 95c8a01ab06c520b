"""The section `limits`: what one client may cost the gateway, in bytes, seconds and connections."""

from __future__ import annotations

from pydantic import model_validator

from gateway.config.values import Count, Duration, Section, Size, setting

LEAST_SEND_BUFFER, MOST_SEND_BUFFER = 16 << 10, 1 << 30


class Limits(Section):
    """What one client may cost the gateway."""

    body: Size = setting(
        "32MiB", "Largest request body; a larger one is refused with 413, early when it says so."
    )
    body_budget: Size = setting(
        "512MiB", "Memory for all request bodies at once; beyond it new ones are shed with 429."
    )
    headers_timeout: Duration = setting(
        "10s", "Time for a client to send its request line and headers."
    )
    body_timeout: Duration = setting("60s", "Time for a client to send its body.")
    body_min_rate: Size = setting(
        "1KiB", "Bytes per second a body must keep up once the first second is over."
    )
    idle_timeout: Duration = setting(
        "75s", "How long a client connection may stay open between requests."
    )
    slow_reader: Duration = setting(
        "30s", "How long a client may leave its answer unread before it is cut off."
    )
    send_buffer: Size = setting(
        "256KiB",
        "Memory in the kernel, per client connection, for what its client has not acknowledged; a quarter of it may "
        "wait to be sent. It limits the speed of a connection as well: about 180 KiB per round trip.",
    )
    body_chunks: Count = setting(16384, "Most chunks in one chunked body.")
    sequences: Count = setting(
        256,
        "Most sequences that one request may ask for: its prompts times `n` or `best_of`. More are a 400.",
    )
    connections: Count = setting(20000, "Most client connections at once.")
    connections_per_address: Count = setting(
        4096,
        "Most connections at once from one IPv4 address, or from one /64 network of IPv6. None for "
        "listeners.api.trusted_proxies.",
    )
    unread_budget: Size = setting(
        "16MiB",
        "Memory, as a part of body_budget, for what belongs to no request yet: unfinished heads, pipelined requests. "
        "Beyond it the connection that began first with such bytes loses them.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Limits:
        if self.body > self.body_budget:
            raise ValueError(
                "body is larger than body_budget, so the largest allowed request could never be served"
            )
        if not LEAST_SEND_BUFFER <= self.send_buffer <= MOST_SEND_BUFFER:
            raise ValueError("send_buffer must be between 16KiB and 1GiB")
        return self
