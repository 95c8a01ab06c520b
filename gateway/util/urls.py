"""Builds the http or https URL of a host and a port."""

from __future__ import annotations


def http_url(host: str, port: int, *, encrypted: bool = False) -> str:
    """Return the URL of a host and a port, with an IPv6 address in brackets."""
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
