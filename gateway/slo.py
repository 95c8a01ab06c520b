"""What a request is promised, and what it asks for itself: service class, budgets, priority, session, patience.

Lives here: the headers that say so, and whose word counts. Not here: what members of the body say (openai.py), or what
follows from a promise (policies/).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.answer import Failure, GatewayError
from gateway.config import Config
from policies.model import Slo

CLASS = "x-slo-class"
OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TTFT = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
TPOT = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
PRIORITY = "x-priority"
SESSION = "x-session-id"
PATIENCE = ("x-stainless-read-timeout", "x-stainless-timeout")
NAMES = frozenset((CLASS, *OBJECTIVES, *TTFT, *TPOT, PRIORITY, SESSION, *PATIENCE))

LEAST_TTFT_MS, LEAST_TPOT_MS, MOST_MS = 1, 0.1, 86_400_000
MOST_PRIORITY = 8
HASTY_S = 10.0
MAX_SESSION = 256  # characters
SHOWN = 64  # characters of a bad value that its error repeats

_MILLISECONDS = re.compile(r"[0-9]{1,8}(?:\.[0-9]{1,6})?")
_SECONDS = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,9})?")
_PRIORITY = re.compile(r"[+-]?[0-9]{1,2}")


class Wish(msgspec.Struct, frozen=True):
    """What a request's headers and its tenant say. None: nothing, and what its model or the configuration says holds.

    slo            the class; ttft_s and tpot_s replace its budgets; usual: none of the three is given
    priority       as asked for; its tenant may claim `most_priority`; `ranked` is what counts if the body asks for none
    patience_s     how long its client waits for the first byte
    hasty          so short a time that whether it can be served by then is looked at even where all is calm
    """

    slo: Slo | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int | None = None
    most_priority: int = MOST_PRIORITY
    session: str = ""
    patience_s: float | None = None
    hasty: bool = False
    usual: bool = True
    ranked: int = 0

    def of(self, usual: Slo) -> Slo:
        """The promise to a request of a model whose usual one this is."""
        slo = self.slo or usual
        if self.ttft_s is None and self.tpot_s is None:
            return slo
        return Slo(slo.name, self.ttft_s or slo.ttft_s, self.tpot_s or slo.tpot_s, slo.weight)

    def rank(self, priority: int) -> int:
        """The priority that counts: the header's, else that of the body, within what the tenant may claim."""
        asked = priority if self.priority is None else self.priority
        return max(-MOST_PRIORITY, min(self.most_priority, asked))


NOTHING = Wish()


class Fields(dict[str, str]):
    """The fields of a head by name, in lower case. `known` is the wish that was read from them, and by which Levels;
    `passed` are the lines that engines see of them (legs.py), once somebody asked."""

    __slots__ = ("known", "passed")

    def __init__(self, fields: Iterable[tuple[str, str]]) -> None:
        super().__init__(fields)
        self.known: tuple[Levels, Wish] | None = None
        self.passed: str | None = None


class Levels:
    """The service classes of one configuration, and what is said of each tenant. Never changes."""

    __slots__ = ("_classes", "_tenants", "default")

    def __init__(self, config: Config) -> None:
        classes = {
            name: Slo(name, each.ttft, each.tpot, each.weight)
            for name, each in config.slo.classes.items()
        }
        self._classes: Mapping[str, Slo] = MappingProxyType(classes)
        self._tenants = {
            tenant.name: _wish(self._classes.get(tenant.slo or ""), most_priority=tenant.priority)
            for tenant in config.tenants
        }
        self.default = classes[config.slo.default]

    def named(self, name: str | None) -> Slo:
        """The class of that name; the default one for None."""
        return self.default if name is None else self._classes[name]

    def wish(self, headers: Mapping[str, str], tenant: str) -> Wish:
        """What the headers say, and the tenant where they do not. Raises GatewayError naming a header that is wrong.

        A connection's requests mostly share their headers, which then remember the answer.
        """
        if not isinstance(headers, Fields):
            return self._read(headers, tenant)
        known = headers.known
        if known is None or known[0] is not self:
            known = headers.known = (self, self._read(headers, tenant))
        return known[1]

    def _read(self, headers: Mapping[str, str], tenant: str) -> Wish:
        usual = self._tenants.get(tenant, NOTHING)
        found = {name: value for name in NAMES if (value := headers.get(name)) is not None}
        if not found:
            return usual
        patience_s = _patience_s(found)
        return _wish(
            self._class(found) or usual.slo,
            _budget_s(found, TTFT, LEAST_TTFT_MS),
            _budget_s(found, TPOT, LEAST_TPOT_MS),
            priority=_priority(found),
            most_priority=usual.most_priority,
            session=_session(found, tenant),
            patience_s=patience_s,
            hasty=patience_s is not None and patience_s < HASTY_S,
        )

    def _class(self, found: Mapping[str, str]) -> Slo | None:
        """The class asked for. An objective names somebody else's resource: one that we do not know is none."""
        name = found.get(CLASS)
        if name is None:
            objectives = (self._classes.get(found.get(header, "")) for header in OBJECTIVES)
            return next((slo for slo in objectives if slo is not None), None)
        if name not in self._classes:
            raise _wrong(CLASS, name, f"one of {', '.join(self._classes)}")
        return self._classes[name]


def _wish(
    slo: Slo | None, ttft_s: float | None = None, tpot_s: float | None = None, **more: Any
) -> Wish:
    """A wish with what follows from it worked out: it is read once and asked often."""
    wish = Wish(slo, ttft_s, tpot_s, **more)
    return replace(
        wish, usual=slo is None and ttft_s is None and tpot_s is None, ranked=wish.rank(0)
    )


def _budget_s(found: Mapping[str, str], names: tuple[str, ...], least_ms: float) -> float | None:
    for name in names:
        text = found.get(name)
        if text is not None:
            if not _MILLISECONDS.fullmatch(text) or not least_ms <= float(text) <= MOST_MS:
                raise _wrong(name, text, f"a number of milliseconds from {least_ms} to {MOST_MS}")
            return float(text) / 1000
    return None


def _priority(found: Mapping[str, str]) -> int | None:
    text = found.get(PRIORITY)
    if text is None:
        return None
    if not _PRIORITY.fullmatch(text) or not -MOST_PRIORITY <= int(text) <= MOST_PRIORITY:
        raise _wrong(PRIORITY, text, f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}")
    return int(text)


def _session(found: Mapping[str, str], tenant: str) -> str:
    text = found.get(SESSION, "")
    if len(text) > MAX_SESSION:
        raise _wrong(SESSION, text, f"at most {MAX_SESSION} characters long")
    return session_key(tenant, text)


def session_key(tenant: str, name: str) -> str:
    """A session as admissions know it: two tenants that choose one name have two sessions."""
    return f"{tenant}\0{name}" if name and tenant else name


def _patience_s(found: Mapping[str, str]) -> float | None:
    """What SDKs tell of their timeouts by themselves, in seconds. Nobody wrote it, so what is odd is passed over."""
    told = [float(text) for name in PATIENCE if _SECONDS.fullmatch(text := found.get(name, ""))]
    return min((seconds for seconds in told if seconds > 0), default=None)


def _wrong(header: str, text: str, wanted: str) -> GatewayError:
    shown = text[:SHOWN].encode("unicode_escape").decode() + ("..." if len(text) > SHOWN else "")
    return GatewayError(
        Failure.BAD_REQUEST, f"The header '{header}' must be {wanted}, not '{shown}'.", param=header
    )
