"""TlsFiles: which certificates a TLS link uses. Not here: how they are read and used (transports/tls.py)."""

from __future__ import annotations

import msgspec


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """
    certificate   PEM file: this agent's certificate and what leads from it to an authority
    key           PEM file: its private key, not encrypted
    ca            PEM file: the authorities; every peer must have a certificate of theirs
    peer_name     DNS name that every peer's certificate must hold. "": the certificate of a dialled peer must hold
                  the dialled host name or address, and a peer that dials may have any name
    """

    certificate: str
    key: str
    ca: str
    peer_name: str = ""
