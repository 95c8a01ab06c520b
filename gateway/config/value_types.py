"""Types of single values (durations, sizes, URLs, names, secrets), and the base class of sections.

Default values are written as in a configuration file ("30s", "32MiB"), and parsed the same way.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Any, Literal
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

from gateway.config.yaml_source import number_if_substituted
from gateway.util import durations_and_sizes
from gateway.util.client_networks import normalize_network

MIN_INTERVAL_S = 0.01
AUTO: Literal["auto"] = "auto"
MAX_WORKERS = 64

_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~%:@+-]+)*")
_HOST = re.compile(r"[0-9A-Za-z._-]+")
_API_PATHS = re.compile(r"/(chat/completions|completions|embeddings|messages|models|responses)$")
_PARAMETERS = re.compile(r"^([0-9]{1,6}(?:\.[0-9]{1,3})?)([MBT])$")


class Secret(SecretStr):
    """A secret text that is not shown in repr, logs, dumps and tracebacks; reveal() returns it."""

    def reveal(self) -> str:
        """Return the secret itself. Use this only to compare or to send the secret."""
        return self.get_secret_value()


def _text(value: object, problem: str) -> str:
    # Return the value as text. Raises ValueError for anything but text and numbers.
    #
    # A bare number is accepted here, because the parser can explain better what is missing.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(problem)
    # str() of a Substituted would turn its repr from the reference into the value.
    return value if isinstance(value, str) else str(value)


def _from_duration(value: object) -> float:
    value = _text(value, "is not a duration; write a number with a unit, as in 250ms or 1m30s")
    seconds = durations_and_sizes.parse_duration(value)
    if seconds <= 0:
        raise ValueError(f"{value!r} is not a positive duration; it must be longer than 0s")
    return seconds


def _interval(seconds: float) -> float:
    if seconds < MIN_INTERVAL_S:
        raise ValueError(
            f"the interval must be at least {MIN_INTERVAL_S * 1000.0:g}ms, not "
            f"{seconds * 1000.0:g}ms"
        )
    return seconds


def _from_size(value: object) -> int:
    value = _text(value, "is not a size; write a number with a unit, as in 32MiB")
    size = durations_and_sizes.parse_size(value)
    if size <= 0:
        raise ValueError(f"{value!r} is not a positive size; it must be more than 0B")
    return size


def _from_parameters(value: object) -> float:
    match = _PARAMETERS.fullmatch(value) if isinstance(value, str) else None
    if match is None or not float(match[1]):
        raise ValueError("the number of parameters needs a unit, as in 70B or 0.6B")
    return float(match[1]) * {"M": 1e-3, "B": 1.0, "T": 1e3}[match[2]]


def _resolvable(host: str) -> str:
    # Return the host in ASCII, with brackets around an IPv6 address.
    #
    # Raises ValueError for an invalid name.
    if ":" in host:
        try:
            ip_address(host)
        except ValueError:
            raise ValueError("the URL has an invalid IPv6 address as its host") from None
        return f"[{host}]"
    try:
        name = host.encode("idna").decode()
    except UnicodeError:
        raise ValueError(
            "the URL has an invalid host: a part of it is empty or longer than 63 characters"
        ) from None
    if not _HOST.fullmatch(name):
        raise ValueError(
            "the URL has an invalid host; use letters, digits and -._ (an environment "
            "variable is written ${NAME})"
        )
    return name


def engine_url(url: str) -> str:
    """Return an engine's URL in normal form: with a port, and without a final slash.

    Raises ValueError if the URL is invalid.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError(
            "the URL of an engine must have a valid port, as in http://host:8000"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("the URL of an engine must have the form http://host:8000 or https://host")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            "the URL of an engine must have only a scheme, a host, a port and a path prefix, "
            "as in http://host:8000 or https://host/a"
        )
    prefix = parts.path.rstrip("/")
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(
            "the URL of an engine has an invalid path prefix: use letters, digits and -._~%:@+ "
            "between single slashes"
        )
    if prefix.endswith("/v1"):
        raise ValueError(
            "the URL of an engine must not end with /v1, because the gateway adds the API's paths"
        )
    if api := _API_PATHS.search(prefix):
        raise ValueError(
            f"the URL of an engine must not end with /{api[1]}, because the gateway adds the "
            "API's paths, as in /v1/chat/completions"
        )
    port = port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{_resolvable(parts.hostname)}:{port}{prefix}"


def without_scheme(url: str) -> str:
    """Return a URL without its leading http:// or https://."""
    return url.partition("://")[2]


def _collector_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            "the URL of a trace collector must have the form http://host:4318/v1/traces"
        )
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            "the URL of a trace collector must have only a scheme, a host, a port and a "
            "path; put a token under `key`"
        )
    _resolvable(parts.hostname)
    return url


def _host_and_port(text: str) -> str:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or parts.netloc != text or parts.username is not None:
        raise ValueError("the address must have the form host:port, as in 10.0.0.7:8998")
    _resolvable(parts.hostname)
    return text


def _origin(text: str) -> str:
    # Return `text` if it is an origin as browsers send it, or "*". Raises ValueError.
    parts = urlsplit(text)
    is_origin = f"{parts.scheme}://{parts.netloc}" == text and parts.hostname and parts.scheme
    if text != "*" and (not is_origin or text.lower() != text or "@" in parts.netloc):
        raise ValueError(
            "an origin must be a scheme, a host and a port in lower case, as in "
            "https://app.example.com, or the value *"
        )
    return text


def _redis_url(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError(
            "the URL of a Redis server must have a valid port, as in redis://host:6379"
        ) from None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("the URL of a Redis server must have the form redis://host:6379")
    database = parts.path.strip("/")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "the URL of a Redis server must not contain a user or a password; use the keys for them"
        )
    if (
        parts.query
        or parts.fragment
        or (database and not (database.isascii() and database.isdigit()))
    ):
        raise ValueError(
            "the URL of a Redis server must have only a scheme, a host, a port and a "
            "database, as in redis://host:6379/0"
        )
    return f"{parts.scheme}://{_resolvable(parts.hostname)}:{port or 6379}/{database or 0}"


Duration = Annotated[
    float,
    BeforeValidator(_from_duration),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": durations_and_sizes.DURATION_PATTERN,
            "title": "Duration",
            "examples": ["250ms"],
        }
    ),
]
"""A duration in seconds, written with a unit, for example 30s."""

Interval = Annotated[Duration, AfterValidator(_interval)]
"""The seconds between two rounds of a periodic task, written with a unit, for example 500ms.

Its lower bound leaves time for other tasks.
"""

Size = Annotated[
    int,
    BeforeValidator(_from_size),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": durations_and_sizes.SIZE_PATTERN,
            "title": "Size",
            "examples": ["32MiB"],
        }
    ),
]
"""A number of bytes, written with a unit, for example 32MiB."""

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
"""A number of model parameters in billions, written with a unit, for example 70B."""


def _worker_count(value: object) -> object:
    number = number_if_substituted(value)
    if number == AUTO:
        return AUTO
    if type(number) is not int or not 1 <= number <= MAX_WORKERS:
        raise ValueError(f"the number of workers must be from 1 to {MAX_WORKERS}, or auto")
    return number


Count = Annotated[int, Field(strict=True, ge=1, le=2**40), BeforeValidator(number_if_substituted)]
WorkerCount = Annotated[
    Annotated[int, Field(strict=True, ge=1, le=MAX_WORKERS)] | Literal["auto"],
    BeforeValidator(_worker_count),
]
Weight = Annotated[float, Field(ge=1e-6, le=1000), BeforeValidator(number_if_substituted)]
Port = Annotated[int, Field(strict=True, ge=0, le=65535), BeforeValidator(number_if_substituted)]
Name = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f\x7f\"\\]+$", max_length=200)]
RedisUrl = Annotated[str, StringConstraints(max_length=2048), AfterValidator(_redis_url)]
CollectorUrl = Annotated[str, StringConstraints(max_length=2048), AfterValidator(_collector_url)]
Host = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.:_-]+$", max_length=253)]
Url = Annotated[str, StringConstraints(max_length=2048), AfterValidator(engine_url)]
HttpPath = Annotated[str, StringConstraints(pattern=r"^/[!-~]*$", max_length=200)]
Label = Annotated[str, StringConstraints(max_length=200)]
Origin = Annotated[
    str, StringConstraints(pattern=r"^[!-~]+$", max_length=300), AfterValidator(_origin)
]
Cidr = Annotated[str, StringConstraints(max_length=64), AfterValidator(normalize_network)]
Bootstrap = Annotated[str, StringConstraints(max_length=300), AfterValidator(_host_and_port)]


def setting(default: object, text: str) -> Any:
    """Declare a configuration field with a description and a default as written in a file."""
    return Field(default, description=text, validate_default=True)


def check_sendable(key: Secret | None) -> Secret | None:
    """Return an API key unchanged if it can be sent in an HTTP header.

    Raises ValueError if it cannot.
    """
    text = None if key is None else key.reveal()
    if text is not None and (
        not text or not text.isascii() or not text.isprintable() or text.strip() != text
    ):
        raise ValueError(
            "the key cannot be sent in a header; it must be printable ASCII, not empty, and "
            "without blanks at its ends"
        )
    return key


class Section(BaseModel):
    """The base class of configuration sections: immutable mappings that reject unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, populate_by_name=True
    )
