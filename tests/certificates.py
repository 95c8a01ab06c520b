"""Certificates for tests: an authority, and what it signs, as PEM files in a directory."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates for host names and addresses. `path` is its own certificate."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory, self._name = directory, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = directory / f"{name}.pem"
        usage = x509.BasicConstraints(ca=True, path_length=None)
        certificate = self._builder(self._name, self._key.public_key(), 1).add_extension(usage, critical=True)
        self.path.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def issue(self, file: str, *hosts: str, days: int = 1) -> tuple[Path, Path]:
        """Files of a certificate for these hosts, and of its key. `days` below 0: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file)])
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        certificate = self._builder(subject, key.public_key(), days).add_extension(names, critical=False)
        cert_path, key_path = self._directory / f"{file}.crt", self._directory / f"{file}.key"
        cert_path.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert_path, key_path

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 9 * _DAY)
            .not_valid_after(now + days * _DAY)
        )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
