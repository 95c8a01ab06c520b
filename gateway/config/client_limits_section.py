"""The configuration section `limits`: the memory, time and connections that clients may use."""

from __future__ import annotations

from pydantic import model_validator

from gateway.config.value_types import Count, Duration, Section, Size, setting

MIN_SOCKET_BUFFER, MAX_SOCKET_BUFFER = 16 << 10, 1 << 30


class Limits(Section):
    """Limits on the gateway's memory, time and connections that clients may use."""

    body: Size = setting(
        "32MiB",
        "Maximum size of a request body. A larger one is refused with 413, before it is read if "
        "Content-Length announces it.",
    )
    body_budget: Size = setting(
        "512MiB",
        "Memory for the bodies of all requests in progress; when it is used up, new requests get "
        "429.",
    )
    headers_timeout: Duration = setting(
        "10s", "Maximum time for a client to send the request line and headers of a request."
    )
    body_timeout: Duration = setting(
        "60s", "Maximum time for a client to send the body of a request."
    )
    body_min_rate: Size = setting(
        "1KiB",
        "Minimum bytes per second at which a request body must arrive, after its first second.",
    )
    idle_timeout: Duration = setting(
        "75s", "Maximum time that a client connection may stay open without a request."
    )
    slow_reader: Duration = setting(
        "30s",
        "Maximum time that a client may leave a response unread before its connection is closed.",
    )
    send_buffer: Size = setting(
        "256KiB",
        "Kernel memory per client connection for sent data that the client has not acknowledged, "
        "of which a quarter may be unsent. It also limits a connection's speed: the default "
        "allows about 180 KiB per round trip.",
    )
    receive_buffer: Size = setting(
        "256KiB",
        "Kernel memory per client connection for bytes that the gateway has not read yet. It also "
        "limits the speed of uploads: the default allows about 180 KiB per round trip. Linux "
        "uses at most twice net.core.rmem_max.",
    )
    body_chunks: Count = setting(
        16384, "Maximum number of chunks in a request body with chunked transfer coding."
    )
    sequences: Count = setting(
        256,
        "Maximum number of sequences in one request: its number of prompts times `n` or "
        "`best_of`. A request for more gets 400.",
    )
    connections: Count = setting(20000, "Maximum number of client connections.")
    connections_per_address: Count = setting(
        4096,
        "Maximum number of connections from one IPv4 address or one IPv6 /64 network. Addresses "
        "in listeners.api.trusted_proxies are exempt.",
    )
    unread_budget: Size = setting(
        "16MiB",
        "Part of body_budget for bytes that belong to no request yet: incomplete heads and "
        "pipelined requests. When it is used up, the connection with the oldest such bytes loses "
        "them and is closed.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Limits:
        if self.body > self.body_budget:
            raise ValueError(
                "body must not be larger than body_budget, the memory for all bodies; lower body "
                "or raise body_budget"
            )
        for name in ("send_buffer", "receive_buffer"):
            if not MIN_SOCKET_BUFFER <= getattr(self, name) <= MAX_SOCKET_BUFFER:
                raise ValueError(
                    f"{name} must be from 16KiB to 1GiB, not {getattr(self, name)} bytes"
                )
        return self
