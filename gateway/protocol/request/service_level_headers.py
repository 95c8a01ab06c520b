"""Reads service-level headers: class, latency targets, priority, session and client timeout.

request_body.py reads the body members with the same meaning. The policies use the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from gateway.config import Config, Tenant
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.forwarded_headers import plain_request_id
from gateway.protocol.request.sessions import (
    MAX_SESSION_CHARS,
    SESSION_HEADER,
    SESSION_HEADER_NAMES,
    read_header_session,
    session_key,
)
from policies.routing_types import SessionHints, Slo

CLASS_HEADER = "x-slo-class"
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TTFT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
TPOT_HEADERS = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
PRIORITY_HEADER = "x-priority"
TIMEOUT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
CLIENT_ID_HEADERS = ("x-client-request-id", "x-request-id")
HEADER_NAMES = frozenset(
    (
        CLASS_HEADER,
        *OBJECTIVE_HEADERS,
        *TTFT_HEADERS,
        *TPOT_HEADERS,
        PRIORITY_HEADER,
        *SESSION_HEADER_NAMES,
        *TIMEOUT_HEADERS,
        *CLIENT_ID_HEADERS,
    )
)

MIN_TTFT_MS, MIN_TPOT_MS, MAX_BUDGET_MS = 1, 0.1, 86_400_000
MAX_PRIORITY = 8
SHORT_DEADLINE_S = 10.0  # a client timeout below this is a short deadline
MAX_SHOWN_CHARS = 64  # characters of a bad value that its error message repeats

_MILLISECONDS = re.compile(r"[0-9]{1,8}(?:\.[0-9]{1,6})?")
_SECONDS = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,9})?")
_PRIORITY = re.compile(r"[+-]?[0-9]{1,2}")


class RequestPreferences(msgspec.Struct, frozen=True):
    """The service level that a request's headers and its tenant specify.

    A value of None means the model's default.

    slo                 the service class
    ttft_s              target in seconds for the first token, in place of the class's target
    tpot_s              target in seconds per further token, in place of the class's target
    header_priority     priority from the header, at most `max_priority` of the tenant
    default_priority    the effective priority if the body does not give one
    session             key of the session; "" without one
    session_source      name of the header that names the session
    session_hints       what the headers say about the session's future; None: nothing
    client_request_id   the client's own id of the request, for the access log
    patience_s          seconds that the client waits for the first byte
    has_short_deadline  whether patience_s is so short that it is checked even without overload
    is_default          whether neither a class nor a target is given
    is_batch            whether the request belongs to a batch of the Batch API
    skips_queue         whether the request enters its pool before all waiting requests. Only the
                        gateway's own batch runner sets this
    """

    slo: Slo | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    header_priority: int | None = None
    max_priority: int = MAX_PRIORITY
    session: str = ""
    patience_s: float | None = None
    has_short_deadline: bool = False
    is_default: bool = True
    default_priority: int = 0
    session_source: str = ""
    session_hints: SessionHints | None = None
    client_request_id: str = ""
    skips_queue: bool = False
    is_batch: bool = False

    def resolve_slo(self, model_slo: Slo) -> Slo:
        """Return the latency targets of a request; `model_slo` has the model's default ones."""
        slo = self.slo or model_slo
        if self.ttft_s is None and self.tpot_s is None:
            return slo
        return Slo(slo.name, self.ttft_s or slo.ttft_s, self.tpot_s or slo.tpot_s, slo.weight)

    def effective_priority(self, priority: int) -> int:
        """Return the effective priority, at most the highest that the tenant may use.

        `priority` is the body's priority. A priority in the header takes precedence.
        """
        return _clamp(
            priority if self.header_priority is None else self.header_priority, self.max_priority
        )


NO_PREFERENCES = RequestPreferences()


class HeaderFields(dict[str, str]):
    """Header fields by lower-case name, with cached results of reading them.

    cached_preferences  the service level that was read from them, and the ServiceClasses used for
                        it
    forwarded_lines     the header lines that engines receive, once computed (see forwarding/)
    """

    __slots__ = ("cached_preferences", "forwarded_lines")

    def __init__(self, fields: Iterable[tuple[str, str]]) -> None:
        super().__init__(fields)
        self.cached_preferences: tuple[ServiceClasses, RequestPreferences] | None = None
        self.forwarded_lines: str | None = None


class ServiceClasses:
    """The service classes and the tenants' default service levels of one configuration. Immutable.

    default_class  the class of requests that specify none. Without a section `slo`, its latency
                   targets are built in, and are not promised to any client
    """

    __slots__ = ("_classes", "_tenants", "default_class")

    def __init__(self, config: Config) -> None:
        classes = {
            name: Slo(name, section.ttft, section.tpot, section.weight)
            for name, section in config.slo.classes.items()
        }
        self._classes: Mapping[str, Slo] = MappingProxyType(classes)
        self._tenants = {tenant.name: self._defaults(tenant) for tenant in config.tenants}
        default = classes[config.slo.default]
        is_configured = bool(config.slo.model_fields_set)
        self.default_class = msgspec.structs.replace(default, is_promised=is_configured)

    def get_class(self, name: str | None) -> Slo:
        """Return the service class with this name; the default class if `name` is None."""
        return self.default_class if name is None else self._classes[name]

    def read_preferences(self, headers: Mapping[str, str], tenant: str) -> RequestPreferences:
        """Return the service level in the headers, completed by the tenant's defaults.

        The result is cached in `headers`, which the requests of one connection usually share.
        Raises GatewayError for an invalid header.
        """
        if not isinstance(headers, HeaderFields):
            return self._read(headers, tenant)
        cached = headers.cached_preferences
        if cached is None or cached[0] is not self:
            cached = headers.cached_preferences = (self, self._read(headers, tenant))
        return cached[1]

    def _read(self, headers: Mapping[str, str], tenant: str) -> RequestPreferences:
        defaults = self._tenants.get(tenant, NO_PREFERENCES)
        # Names of other mappings may have upper-case letters.
        is_lower = type(headers) is HeaderFields
        names = HEADER_NAMES.intersection(headers) if is_lower else HEADER_NAMES
        given = {name: value for name in names if (value := headers.get(name)) is not None}
        if not given:
            return defaults
        slo, most_priority = self._class(given) or defaults.slo, defaults.max_priority
        ttft_s = _budget_s(given, TTFT_HEADERS, MIN_TTFT_MS)
        tpot_s = _budget_s(given, TPOT_HEADERS, MIN_TPOT_MS)
        priority, patience_s = _priority(given), _patience_s(given)
        _check_session(given)
        session = read_header_session(given)
        return RequestPreferences(
            slo,
            ttft_s,
            tpot_s,
            priority,
            most_priority,
            session=session_key(tenant, session.name),
            patience_s=patience_s,
            has_short_deadline=patience_s is not None and patience_s < SHORT_DEADLINE_S,
            is_default=slo is None and ttft_s is None and tpot_s is None,
            default_priority=_clamp(priority or 0, most_priority),
            session_source=session.source,
            session_hints=SessionHints(is_last=True) if session.is_last else None,
            client_request_id=_client_request_id(given),
        )

    def _defaults(self, tenant: Tenant) -> RequestPreferences:
        # Return the preferences of a tenant's requests whose headers specify no service level.
        slo = self._classes.get(tenant.slo or "")
        return RequestPreferences(
            slo,
            max_priority=tenant.priority,
            is_default=slo is None,
            default_priority=_clamp(0, tenant.priority),
        )

    def _class(self, given: Mapping[str, str]) -> Slo | None:
        # Return the service class that the headers request, or None if they request none.
        #
        # Unknown objectives are ignored, because other systems use those headers too.
        name = given.get(CLASS_HEADER)
        if name is None:
            objectives = (self._classes.get(given.get(header, "")) for header in OBJECTIVE_HEADERS)
            return next((slo for slo in objectives if slo is not None), None)
        if name not in self._classes:
            raise _invalid(CLASS_HEADER, name, f"one of {', '.join(self._classes)}")
        return self._classes[name]


def _clamp(priority: int, most: int) -> int:
    return max(-MAX_PRIORITY, min(most, priority))


def _budget_s(given: Mapping[str, str], names: tuple[str, ...], least_ms: float) -> float | None:
    for name in names:
        text = given.get(name)
        if text is not None:
            if not _MILLISECONDS.fullmatch(text) or not least_ms <= float(text) <= MAX_BUDGET_MS:
                raise _invalid(
                    name, text, f"a number of milliseconds from {least_ms} to {MAX_BUDGET_MS}"
                )
            return float(text) / 1000
    return None


def _priority(given: Mapping[str, str]) -> int | None:
    text = given.get(PRIORITY_HEADER)
    if text is None:
        return None
    if not _PRIORITY.fullmatch(text) or not -MAX_PRIORITY <= int(text) <= MAX_PRIORITY:
        raise _invalid(
            PRIORITY_HEADER, text, f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    return int(text)


def _check_session(given: Mapping[str, str]) -> None:
    # Raise GatewayError for a session id that is too long.
    #
    # Only the gateway's own session header is checked: agents send the others unasked.
    text = given.get(SESSION_HEADER, "")
    if len(text) > MAX_SESSION_CHARS:
        raise _invalid(SESSION_HEADER, text, f"at most {MAX_SESSION_CHARS} characters long")


def _client_request_id(given: Mapping[str, str]) -> str:
    ids = (plain_request_id(given.get(name, "")) for name in CLIENT_ID_HEADERS)
    return next(filter(None, ids), "")


def _patience_s(given: Mapping[str, str]) -> float | None:
    # Return the client's timeout in seconds as its SDK reports it, or None without a valid one.
    #
    # Invalid values are ignored: SDKs add these headers unasked, so an error would help no user.
    timeouts = [
        float(text) for name in TIMEOUT_HEADERS if _SECONDS.fullmatch(text := given.get(name, ""))
    ]
    return min((seconds for seconds in timeouts if seconds > 0), default=None)


def _invalid(header: str, text: str, expected: str) -> GatewayError:
    shown = text[:MAX_SHOWN_CHARS].encode("unicode_escape").decode() + (
        "..." if len(text) > MAX_SHOWN_CHARS else ""
    )
    message = f"The header '{header}' must be {expected}, not '{shown}'."
    return GatewayError(Failure.BAD_REQUEST, message, param=header)
