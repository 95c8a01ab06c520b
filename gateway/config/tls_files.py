"""Checks the files that TLS sections name, and adds them to the digest. An expired certificate is a warning only.

With an error the gateway could not be restarted, and would refuse changes that have nothing to do with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path as FilePath

import msgspec

from gateway import tls
from gateway.config.problems import Path, show_path
from gateway.config.source import Source
from gateway.config.tls import ClientTls, ListenerTls
from gateway.config.tree import Config


def examine(config: Config, source: Source) -> None:
    """Add what is wrong with the files to the problems of the source, and the files to what it was made from."""
    files = _Files(source)
    for path, section in _sections(config):
        for at, pair in _pairs(path, section):
            files.pair(at, pair)
        if isinstance(section, ListenerTls):
            files.authorities(path, "client_ca", section.client_ca)
        else:
            files.authorities(path, "ca", section.ca)


class Certificate(msgspec.Struct, frozen=True):
    """A certificate that the configuration names at `path`. `doubt`: why its peers refuse it now, if they do."""

    path: str
    file: str
    not_after: float
    doubt: str | None


def certificates(config: Config, now: float) -> Iterator[Certificate]:
    """The certificates of the configuration that can be read now, each at the first place that names it."""
    first: dict[tls.KeyPair, Path] = {}
    for path, section in _sections(config):
        for at, pair in _pairs(path, section):
            first.setdefault(pair, at)
    for pair, path in first.items():
        try:
            times = tls.valid_times(pair)
        except (OSError, ValueError):
            continue  # `examine` names the problem
        yield Certificate(
            show_path((*path, "certificate")), pair.certificate, times.not_after, times.doubt(now)
        )


def _pairs(path: Path, section: ListenerTls | ClientTls) -> Iterator[tuple[Path, tls.KeyPair]]:
    """The certificates of a section with their keys, and where the section names them."""
    if isinstance(section, ListenerTls):
        yield path, section.pair
        yield from (((*path, "more", index), each.pair) for index, each in enumerate(section.more))
    elif section.settings.pair is not None:
        yield path, section.settings.pair


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
    """The files of one configuration. Thousands of endpoints may name the same: each is read once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pairs: dict[tls.KeyPair, tuple[tls.FileProblem, ...]] = {}
        self._authorities: dict[str, tls.FileProblem | None] = {}
        self._digests: dict[str, bytes] = {}

    def pair(self, path: Path, pair: tls.KeyPair) -> None:
        """A certificate and its key, under `path`."""
        if pair not in self._pairs:
            found = self._pairs[pair] = tuple(tls.pair_problems(pair))
            for problem in found:
                if not problem.is_error:
                    self._source.doubt((*path, problem.role), problem.message)
        self._note((*path, "certificate"), pair.certificate)
        self._note((*path, "key"), pair.key)
        for problem in self._pairs[pair]:
            if problem.is_error:
                self._source.fail((*path, problem.role), problem.message)

    def authorities(self, path: Path, key: str, file: str | None) -> None:
        """A file of certificate authorities, at `key` under `path`."""
        if file is None:
            return
        if file not in self._authorities:
            self._authorities[file] = tls.ca_problem(file)
        self._note((*path, key), file)
        problem = self._authorities[file]
        if problem is not None:
            self._source.fail((*path, key), problem.message)

    def _note(self, path: Path, file: str) -> None:
        place = FilePath(file)
        if file not in self._digests:
            content = _content(place)
            self._digests[file] = hashlib.sha256(content).digest()
            self._source.references[place] = None
            self._source.depends_on(file.encode("utf-8", "surrogateescape"), content)
        self._source.files[path] = self._digests[file]


def _content(place: FilePath) -> bytes:
    try:
        if not place.is_file():
            return b""
        with place.open("rb") as file:
            return file.read(tls.FILE_CAP_BYTES + 1)
    except (OSError, ValueError):
        return b""
