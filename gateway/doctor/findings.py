"""What doctor says: a verdict about one thing, what was seen, and what to do."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """UNKNOWN is no failure: nobody outside the engine can tell, and `fix` says how to find out."""

    PASS = "pass"  # noqa: S105  # a verdict, no secret
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Finding(msgspec.Struct, frozen=True):
    """One check of one subject: an engine's name, a place in a file, or the fleet."""

    subject: str
    check: str
    verdict: Verdict
    seen: str
    fix: str = ""


def good(subject: str, check: str, seen: str) -> Finding:
    return Finding(subject, check, Verdict.PASS, seen)


def doubtful(subject: str, check: str, seen: str, fix: str) -> Finding:
    return Finding(subject, check, Verdict.WARN, seen, fix)


def bad(subject: str, check: str, seen: str, fix: str) -> Finding:
    return Finding(subject, check, Verdict.FAIL, seen, fix)


def unknown(subject: str, check: str, seen: str, fix: str) -> Finding:
    return Finding(subject, check, Verdict.UNKNOWN, seen, fix)
