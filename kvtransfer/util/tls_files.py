"""The paths of the certificate files for TLS between KV agents.

transports/tls_links.py reads the files.
"""

from __future__ import annotations

import msgspec


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of the PEM files for TLS between KV agents, and the required name of peers.

    certificate   this agent's certificate, with its chain up to an authority
    key           its private key, not encrypted
    ca            certificates of the authorities; one of them must have issued every peer's
                  certificate
    peer_name     DNS name that every peer's certificate must contain. "": the certificate of a peer
                  to which this agent connects must contain the host in its address; other peers may
                  have any name
    """

    certificate: str
    key: str
    ca: str
    peer_name: str = ""
