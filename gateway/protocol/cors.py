"""Cross-origin resource sharing (CORS): decides which web pages may call the API from a browser.

The API uses no cookies, so a web page has to send an API key itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gateway.protocol.response.date_header import ResponseClock

ANY_ORIGIN = "*"
MAX_AGE_S = 600
MAX_REQUESTED_CHARS = 2048  # characters of the requested headers' names

Headers = tuple[tuple[str, str], ...]

_EXPOSED = (
    "x-request-id, request-id, x-penstock-endpoint, x-penstock-prefill, x-penstock-tier, "
    "x-should-retry, retry-after, retry-after-ms, x-ratelimit-limit-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")


class CorsRule:
    """The web origins whose pages may call the API. Immutable."""

    __slots__ = ("_is_any", "_origins")

    def __init__(self, origins: Sequence[str]) -> None:
        """Create the rule from origins (scheme, host, port) as browsers send them; "*" is all."""
        self._is_any = ANY_ORIGIN in origins
        self._origins = frozenset(origins)

    def response_headers(self, headers: Mapping[str, str]) -> Headers:
        """Return the CORS headers of the response to a request with these headers.

        If the request's origin is not permitted, the result contains no permission.
        """
        origin = headers.get("origin", "")
        if not origin:
            return () if self._is_any else (("vary", "origin"),)
        if not self._is_any and origin not in self._origins:
            return (("vary", "origin"),)
        exposed = ("access-control-expose-headers", _EXPOSED)
        if self._is_any:
            return ("access-control-allow-origin", ANY_ORIGIN), exposed
        return ("access-control-allow-origin", origin), ("vary", "origin"), exposed

    def preflight_headers(
        self, headers: Mapping[str, str], methods: Sequence[str]
    ) -> Headers | None:
        """Return the headers of the response to a CORS preflight request; None for other requests.

        If the request's origin is not permitted, the result contains no permission.
        """
        if "access-control-request-method" not in headers or "origin" not in headers:
            return None
        permitted = self.response_headers(headers)
        if permitted[0][0] != "access-control-allow-origin":
            return permitted
        requested = headers.get("access-control-request-headers", "").strip()
        is_valid = len(requested) <= MAX_REQUESTED_CHARS and _NAMES.fullmatch(requested)
        names = (("access-control-allow-headers", requested),) if is_valid else ()
        return (
            *permitted,
            ("access-control-allow-methods", ", ".join(methods)),
            *names,
            ("access-control-max-age", str(MAX_AGE_S)),
        )


def new_cors_rule(origins: Sequence[str]) -> CorsRule | None:
    """Return the CORS rule for a list of permitted origins; None if the list is empty."""
    return CorsRule(origins) if origins else None


class CorsLines:
    """The header lines of all responses on a client connection: the date, and the CORS headers."""

    __slots__ = ("_clock", "_lines")

    def __init__(self, clock: ResponseClock, headers: Headers) -> None:
        self._clock = clock
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in headers)

    @property
    def line(self) -> str:
        return self._clock.line + self._lines
