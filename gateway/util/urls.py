"""Builds URLs from a host and a port."""

from __future__ import annotations


def http_url(host: str, port: int, *, encrypted: bool = False) -> str:
    """Return http://host:port or https://host:port; an IPv6 address is put in brackets."""
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
