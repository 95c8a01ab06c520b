"""What single values of the configuration are: durations, sizes, names, secrets, and the base of every section.

Defaults are written the way an operator writes them ("30s", "32MiB"), and pass the same parser. Not here: sections.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    WithJsonSchema,
)

from gateway import units
from gateway.config.source import number_if_substituted

LEAST_INTERVAL_S = 0.01

_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~%:@+-]+)*")
_PARAMETERS = re.compile(r"^([0-9]{1,6}(?:\.[0-9]{1,3})?)([MBT])$")


class Secret(SecretStr):
    """Text that never prints: not in a repr, a log line, a dump or a traceback. `reveal()` is the one way to it."""

    def reveal(self) -> str:
        """The text itself; for comparing and for putting on the wire only."""
        return self.get_secret_value()


def _text(value: object, problem: str) -> str:
    """As it was written; a bare number is text too, whose parser says what it lacks. Raises ValueError for others."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(problem)
    return (
        value if isinstance(value, str) else str(value)
    )  # one that was substituted shows no secret in an error


def _from_duration(value: object) -> float:
    value = _text(value, "is not a duration; write a number with a unit, as in 250ms or 1m30s")
    seconds = units.duration_s(value)
    if seconds <= 0:
        raise ValueError(f"{value!r} is no time at all; it must be longer than 0s")
    return seconds


def _interval(seconds: float) -> float:
    if seconds < LEAST_INTERVAL_S:
        raise ValueError(
            f"leaves too little time between two rounds; it must be at least {LEAST_INTERVAL_S * 1e3:g}ms"
        )
    return seconds


def _from_size(value: object) -> int:
    value = _text(value, "is not a size; write a number with a unit, as in 32MiB")
    size = units.size_bytes(value)
    if size <= 0:
        raise ValueError(f"{value!r} is nothing; it must be more than 0B")
    return size


def _from_parameters(value: object) -> float:
    found = _PARAMETERS.fullmatch(value) if isinstance(value, str) else None
    if found is None or not float(found[1]):
        raise ValueError("is not a number of parameters; write it with a unit, as in 70B or 0.6B")
    return float(found[1]) * {"M": 1e-3, "B": 1.0, "T": 1e3}[found[2]]


def _findable(host: str) -> str:
    """The host, in brackets if it is an IPv6 address. Raises ValueError for one that no resolver would look up."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(
            "has a host that is no name: a part of it is empty or longer than 63 characters"
        ) from None
    return f"[{host}]" if ":" in host else host


def engine_url(url: str) -> str:
    """An engine's URL: the port is always given, no slash at the end. Raises ValueError for other text."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError("has no valid port; write http://host:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not the URL of an engine; write http://host:8000 or https://host")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            "must be scheme, host, port and a prefix of paths, as in http://host:8000 or https://host/a"
        )
    prefix = parts.path.rstrip("/")
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(
            "has a prefix that is no path: letters, digits and -._~%:@+ between single slashes"
        )
    if prefix.endswith("/v1"):
        raise ValueError("ends with /v1: the paths are the gateway's; write what stands before it")
    return f"{parts.scheme}://{_findable(parts.hostname)}:{port or (443 if parts.scheme == 'https' else 80)}{prefix}"


def without_scheme(url: str) -> str:
    """The rest of a URL behind http:// or https://."""
    return url.partition("://")[2]


def _collector_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not the URL of a collector; write http://host:4318/v1/traces")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            "must be scheme, host, port and path alone; a key has a key of its own beside it"
        )
    _findable(parts.hostname)
    return url


def _host_and_port(text: str) -> str:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or parts.netloc != text or parts.username is not None:
        raise ValueError("is no address; write host:port, as in 10.0.0.7:8998")
    _findable(parts.hostname)
    return text


def _redis_url(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError("has no valid port; write redis://host:6379") from None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("is not the URL of a Redis; write redis://host:6379")
    database = parts.path.strip("/")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not name a user or password; they have keys of their own beside it")
    if (
        parts.query
        or parts.fragment
        or (database and not (database.isascii() and database.isdigit()))
    ):
        raise ValueError("must be scheme, host, port and database alone, as in redis://host:6379/0")
    return f"{parts.scheme}://{_findable(parts.hostname)}:{port or 6379}/{database or 0}"


def _cidr(text: str) -> str:
    """A network in its usual form. Raises ValueError for text that is none, or names a host inside of one."""
    try:
        return str(ip_network(text))
    except ValueError:
        raise ValueError(
            "is not a network; write it in CIDR form, as in 10.0.0.0/8 or 2001:db8::/32"
        ) from None


Duration = Annotated[
    float,
    BeforeValidator(_from_duration),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": units.DURATION_PATTERN,
            "title": "Duration",
            "examples": ["250ms"],
        }
    ),
]
"""Seconds, written with a unit."""

Interval = Annotated[Duration, AfterValidator(_interval)]
"""The time between two rounds of something that never ends: not so short that nothing else is done."""

Size = Annotated[
    int,
    BeforeValidator(_from_size),
    WithJsonSchema(
        {"type": "string", "pattern": units.SIZE_PATTERN, "title": "Size", "examples": ["32MiB"]}
    ),
]
"""Bytes, written with a unit."""

Parameters = Annotated[
    float,
    BeforeValidator(_from_parameters),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": _PARAMETERS.pattern,
            "title": "Parameters",
            "examples": ["70B"],
        }
    ),
]
"""Billions of parameters, written with a unit."""

Count = Annotated[int, Field(strict=True, ge=1, le=2**40), BeforeValidator(number_if_substituted)]
Weight = Annotated[float, Field(ge=1e-6, le=1000), BeforeValidator(number_if_substituted)]
Port = Annotated[int, Field(strict=True, ge=0, le=65535), BeforeValidator(number_if_substituted)]
Name = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f\x7f\"\\]+$", max_length=200)]
RedisUrl = Annotated[str, StringConstraints(max_length=2048), AfterValidator(_redis_url)]
CollectorUrl = Annotated[str, StringConstraints(max_length=2048), AfterValidator(_collector_url)]
Host = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.:_-]+$", max_length=253)]
Url = Annotated[str, StringConstraints(max_length=2048), AfterValidator(engine_url)]
HttpPath = Annotated[str, StringConstraints(pattern=r"^/[!-~]*$", max_length=200)]
Label = Annotated[str, StringConstraints(max_length=200)]
Cidr = Annotated[str, StringConstraints(max_length=64), AfterValidator(_cidr)]
Bootstrap = Annotated[str, StringConstraints(max_length=300), AfterValidator(_host_and_port)]


def setting(default: object, text: str) -> Any:
    """A field with a default written as in a file, and what it is."""
    return Field(default, description=text, validate_default=True)


def sendable(key: Secret | None) -> Secret | None:
    """A key that can stand in a header. Raises ValueError for others."""
    text = None if key is None else key.reveal()
    if text is not None and (
        not text or not text.isascii() or not text.isprintable() or text.strip() != text
    ):
        raise ValueError(
            "is empty or cannot be sent in a header (printable ASCII without outer blanks)"
        )
    return key


class Section(BaseModel):
    """A mapping of the file: its keys are known, and it never changes."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, populate_by_name=True
    )
