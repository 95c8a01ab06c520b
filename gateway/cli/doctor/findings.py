"""The findings of doctor: a verdict on one check, what was observed, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """The result of a check.

    UNKNOWN is not a failure: it cannot be determined from outside the engine, and `fix` says how to
    find out.
    """

    PASS = "pass"  # noqa: S105  # not a password
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Finding(msgspec.Struct, frozen=True):
    """One check of one subject: an engine's name, a position in a file, or the fleet."""

    subject: str
    check: str
    verdict: Verdict
    seen: str
    fix: str = ""


def good(subject: str, check: str, seen: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(subject, check, Verdict.PASS, seen)


def doubtful(subject: str, check: str, seen: str, fix: str) -> Finding:
    """Return the finding of a check that passed with a warning."""
    return Finding(subject, check, Verdict.WARN, seen, fix)


def bad(subject: str, check: str, seen: str, fix: str) -> Finding:
    """Return the finding of a check that failed."""
    return Finding(subject, check, Verdict.FAIL, seen, fix)


def unknown(subject: str, check: str, seen: str, fix: str) -> Finding:
    """Return the finding of a check that cannot be decided from outside the engine."""
    return Finding(subject, check, Verdict.UNKNOWN, seen, fix)


MAX_SUBJECTS = 8
NAMED_SUBJECTS = 3
_SEVERITY = (Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN, Verdict.PASS)


def group_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings of many subjects into one per check and verdict, worst verdicts first.

    With at most MAX_SUBJECTS subjects, returns the findings unchanged.
    """
    if len({finding.subject for finding in findings}) <= MAX_SUBJECTS:
        return list(findings)
    groups: dict[tuple[Verdict, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.verdict, finding.check, finding.fix), []).append(finding)
    merged = [_merge(group) for group in groups.values()]
    return sorted(merged, key=lambda finding: _SEVERITY.index(finding.verdict))


def _merge(group: Sequence[Finding]) -> Finding:
    first, others = group[0], len(group) - NAMED_SUBJECTS
    subject = ", ".join(finding.subject for finding in group[:NAMED_SUBJECTS])
    if others > 0:
        subject += f" and {others} more"
    is_same = all(finding.seen == first.seen for finding in group)
    return msgspec.structs.replace(
        first, subject=subject, seen=first.seen if is_same else f"for example: {first.seen}"
    )
