"""What doctor says: a verdict about one thing, what was seen, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
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


MOST_SUBJECTS = 8
NAMED_SUBJECTS = 3
_SEVERITY = (Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN, Verdict.PASS)


def group_findings(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per check and verdict where there are many subjects, the worst verdicts first.

    With at most MOST_SUBJECTS subjects the findings are returned as they are.
    """
    if len({each.subject for each in findings}) <= MOST_SUBJECTS:
        return list(findings)
    groups: dict[tuple[Verdict, str, str], list[Finding]] = {}
    for each in findings:
        groups.setdefault((each.verdict, each.check, each.fix), []).append(each)
    merged = [_merge(group) for group in groups.values()]
    return sorted(merged, key=lambda each: _SEVERITY.index(each.verdict))


def _merge(group: Sequence[Finding]) -> Finding:
    first, more = group[0], len(group) - NAMED_SUBJECTS
    subject = ", ".join(each.subject for each in group[:NAMED_SUBJECTS])
    if more > 0:
        subject += f" and {more} more"
    is_same = all(each.seen == first.seen for each in group)
    return msgspec.structs.replace(first, subject=subject, seen=first.seen if is_same else f"for instance {first.seen}")
