"""The paths of the certificate files for TLS between KV agents; transports/tls_links.py reads the
files.
"""

from __future__ import annotations

import msgspec


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of the PEM files for TLS between KV agents, and the name that peers must have.

    certificate   this agent's certificate and its chain up to an authority
    key           its private key, not encrypted
    ca            the authorities; every peer must have a certificate of theirs
    peer_name     DNS name that every peer's certificate must contain. "": a dialled peer's
                  certificate must contain the dialled host, and a dialling peer may have any name
    """

    certificate: str
    key: str
    ca: str
    peer_name: str = ""
