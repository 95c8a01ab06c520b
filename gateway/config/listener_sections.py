"""The configuration section `listeners`: addresses and TLS of the two servers, proxies, CORS."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.tls_sections import ListenerTls
from gateway.config.value_types import Cidr, Host, Origin, Port, Section, setting


class Listener(Section):
    """The address (host and port) and TLS settings of one of the gateway's two servers."""

    host: Host
    port: Port
    tls: ListenerTls | None = setting(None, "TLS settings of this server; plain HTTP by default.")


class ApiListener(Listener):
    """The address of the server for the OpenAI API, which applications use."""

    host: Host = setting(
        "127.0.0.1", "Address on which the OpenAI API listens; 0.0.0.0 listens on every interface."
    )
    port: Port = setting(8080, "Port of the OpenAI API; 0 chooses a free one.")
    trusted_proxies: Annotated[tuple[Cidr, ...], Field(max_length=256)] = setting(
        (),
        "Networks, in CIDR notation, of proxies and load balancers that you operate. They are "
        "exempt from limits per client address, and their headers X-Forwarded-For and "
        "x-request-id are trusted.",
    )
    cors_origins: Annotated[tuple[Origin, ...], Field(max_length=256)] = setting(
        (),
        "Origins of web pages that may call the API from a browser, as in https://app.example.com, "
        "or * for all. None by default.",
    )


class AdminListener(Listener):
    """The address of the admin server, which operators and Prometheus use."""

    host: Host = setting(
        "127.0.0.1",
        "Address on which the admin server (/healthz, /readyz, /metrics and others) listens.",
    )
    port: Port = setting(
        8081, "Port of the admin server, different from that of the API; 0 chooses a free one."
    )


class Listeners(Section):
    """The gateway's two servers: one for applications, one for operators."""

    api: ApiListener = setting({}, "Address and TLS of the OpenAI API.")
    admin: AdminListener = setting(
        {}, "Address and TLS of the admin server: health, metrics and state."
    )
