"""Checks the files that a configuration's TLS sections name, and reports problems by their path.

Their content becomes part of the configuration's digest. An expired certificate is only a warning,
because an error would prevent restarts and reject unrelated changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path as FilePath

import msgspec

from gateway.config.problems import Path, show_path
from gateway.config.root_section import Config
from gateway.config.tls_sections import ClientTls, ListenerTls
from gateway.config.yaml_source import YamlSource
from gateway.util.certificate_files import (
    MAX_FILE_BYTES,
    FileProblem,
    KeyPair,
    ca_problem,
    certificate_validity,
    key_pair_problems,
)


def check_files(config: Config, source: YamlSource) -> None:
    """Check all files that the configuration's TLS sections name, such as certificates.

    Problems and the digests of the files are added to `source`.
    """
    files = _Files(source)
    for path, section in _sections(config):
        for pair_path, pair in _pairs(path, section):
            files.add_pair(pair_path, pair)
        if isinstance(section, ListenerTls):
            files.add_authorities(path, "client_ca", section.client_ca)
        else:
            files.add_authorities(path, "ca", section.ca)


class NamedCertificate(msgspec.Struct, frozen=True):
    """A certificate file, and the path of the setting that names it.

    refusal_reason  why TLS peers refuse the certificate now; None if they accept it
    not_after       Unix time in seconds at which the certificate expires
    """

    path: str
    file: str
    not_after: float
    refusal_reason: str | None


def named_certificates(config: Config, now: float) -> Iterator[NamedCertificate]:
    """Yield each readable certificate once, with the path of the first setting that names it."""
    first: dict[KeyPair, Path] = {}
    for path, section in _sections(config):
        for pair_path, pair in _pairs(path, section):
            first.setdefault(pair, pair_path)
    for pair, path in first.items():
        try:
            times = certificate_validity(pair)
        except (OSError, ValueError):
            continue  # check_files() reports it
        yield NamedCertificate(
            show_path((*path, "certificate")),
            pair.certificate,
            times.not_after,
            times.refusal_reason(now),
        )


def _pairs(path: Path, section: ListenerTls | ClientTls) -> Iterator[tuple[Path, KeyPair]]:
    if isinstance(section, ListenerTls):
        yield path, section.pair
        for index, files in enumerate(section.more):
            yield (*path, "more", index), files.pair
    elif section.settings.key_pair is not None:
        yield path, section.settings.key_pair


def _sections(config: Config) -> Iterator[tuple[Path, ListenerTls | ClientTls]]:
    for name, listener in (("api", config.listeners.api), ("admin", config.listeners.admin)):
        if listener.tls is not None:
            yield ("listeners", name, "tls"), listener.tls
    for name, pool in config.pools.items():
        for index, spec in enumerate(pool.endpoints):
            if spec.tls is not None:
                yield ("pools", name, "endpoints", index, "tls"), spec.tls
        if pool.discover is not None and pool.discover.endpoint.tls is not None:
            yield ("pools", name, "discover", "endpoint", "tls"), pool.discover.endpoint.tls
    if config.shared is not None and config.shared.redis.tls is not None:
        yield ("shared", "redis", "tls"), config.shared.redis.tls


class _Files:
    # The contents of the files that a configuration names. Each file is read only once.

    def __init__(self, source: YamlSource) -> None:
        self._source = source
        self._pairs: dict[KeyPair, tuple[FileProblem, ...]] = {}
        self._authorities: dict[str, FileProblem | None] = {}
        self._digests: dict[str, bytes] = {}

    def add_pair(self, path: Path, pair: KeyPair) -> None:
        if pair not in self._pairs:
            problems = self._pairs[pair] = tuple(key_pair_problems(pair))
            for problem in problems:
                if not problem.is_error:
                    self._source.warn((*path, problem.role), problem.message)
        self._add_digest((*path, "certificate"), pair.certificate)
        self._add_digest((*path, "key"), pair.key)
        for problem in self._pairs[pair]:
            if problem.is_error:
                self._source.add_error((*path, problem.role), problem.message)

    def add_authorities(self, path: Path, key: str, file: str | None) -> None:
        if file is None:
            return
        if file not in self._authorities:
            self._authorities[file] = ca_problem(file)
        self._add_digest((*path, key), file)
        problem = self._authorities[file]
        if problem is not None:
            self._source.add_error((*path, key), problem.message)

    def _add_digest(self, path: Path, file: str) -> None:
        file_path = FilePath(file)
        if file not in self._digests:
            content = _content(file_path)
            self._digests[file] = hashlib.sha256(content).digest()
            self._source.references[file_path] = None
            self._source.add_to_digest(file.encode("utf-8", "surrogateescape"), content)
        self._source.files[path] = self._digests[file]


def _content(file_path: FilePath) -> bytes:
    try:
        if not file_path.is_file():
            return b""
        with file_path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError):
        return b""
