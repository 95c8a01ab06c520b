"""Converts option values of other routers to gateway.yaml's form: numbers, durations, URLs."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import urlsplit

from gateway.migrate.config_draft import Draft, MigrationError, variables, with_references

Converter = Callable[[str], object | None]
"""A function that converts an option's value to the form of gateway.yaml.

It returns None if the value has no counterpart, and raises MigrationError for a value that the
source could not read either.
"""

_DP_RANK = re.compile(r"@[0-9]+$")
MOST_ATTEMPTS = 16


def text(value: str) -> str:
    """Rewrite references to environment variables in a text as ${NAME}, gateway.yaml's form."""
    return with_references(value)


def number(value: str) -> int | str:
    """Return an option's value as a whole number, or unchanged if it is a reference to a variable.

    Raises MigrationError if it is neither.
    """
    value = with_references(value.strip())
    if "${" in value:
        return value
    try:
        return int(value)
    except ValueError:
        raise MigrationError(f"{value!r} is not a whole number") from None


def ratio(value: str) -> float | str:
    """Return an option's value as a number, or unchanged if it is a reference to a variable.

    Raises MigrationError if it is neither.
    """
    value = with_references(value.strip())
    if "${" in value:
        return value
    try:
        return float(value)
    except ValueError:
        raise MigrationError(f"{value!r} is not a number") from None


def positive(value: str) -> int | str | None:
    """Return an option's value as a whole number above zero; None for zero and less.

    A reference to a variable is returned unchanged.
    """
    count = number(value)
    return None if isinstance(count, int) and count < 1 else count


def seconds(value: str) -> str | None:
    """Return a number of seconds as a duration such as "30s"; None for zero and less."""
    duration = ratio(value)
    if isinstance(duration, str):
        return f"{duration}s"
    return f"{duration:g}s" if duration > 0 else None


def size(value: str) -> str | None:
    """Return a number of bytes as a size such as "32MiB"; None for zero and less."""
    count = positive(value)
    if count is None or isinstance(count, str):
        return None if count is None else f"{count}B"
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if not count % (1 << shift):
            return f"{count >> shift}{unit}"
    return f"{count}B"


def attempts(value: str) -> int | str:
    """Convert a number of retries to a number of attempts, which is one more.

    The result is at least 1, and at most what the gateway permits. A reference to a variable is
    returned unchanged.
    """
    retries = number(value)
    return retries if isinstance(retries, str) else max(1, min(MOST_ATTEMPTS, retries + 1))


def log_level(value: str) -> str:
    """Return the gateway's log level that corresponds to another router's level."""
    names = {"warn": "warning", "critical": "error", "trace": "debug"}
    level = value.lower()
    return names.get(level, level)


def engine_url(value: str, item: str, draft: Draft) -> str | None:
    """Return an engine's URL without its data parallel rank and API version.

    For a protocol other than HTTP, return None, and add a note about `item` to the draft.
    """
    url = with_references(value.strip()).rstrip("/")
    if "://" not in url and "${" not in url:
        url = f"http://{url}"
    if url.partition("://")[0] in ("grpc", "grpcs", "ipc", "zmq", "tcp"):
        draft.drop(f"{item} {value}", "engines are only called over HTTP")
        return None
    if _DP_RANK.search(url):
        url = _DP_RANK.sub("", url)
        draft.differ(f"{item} {value}", "an engine with data parallelism is one endpoint")
    url = url.removesuffix("/v1").rstrip("/")
    if url.startswith("${"):
        name = next(variables(url), "")
        draft.do(item, f"set {name} to the engine's URL, such as http://host:8000, without /v1")
    return url


def host_of(url: str) -> str:
    """Return the host of a URL; "" if it has none."""
    return urlsplit(url).hostname or ""


def distinct(endpoints: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the endpoints, but only the first of those that have the same URL."""
    by_url: dict[object, dict[str, object]] = {}
    for endpoint in endpoints:
        by_url.setdefault(endpoint["url"], endpoint)
    return list(by_url.values())
