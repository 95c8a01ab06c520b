"""The findings of `penstock doctor`: a verdict on one check, what was observed, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class CheckVerdict(StrEnum):
    """The result of one check by `penstock doctor`.

    UNKNOWN is not a failure: the result cannot be determined from outside the engine. `fix` then
    says how to find out.
    """

    PASS = "pass"  # not a password  # noqa: S105
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class CheckFinding(msgspec.Struct, frozen=True):
    """The result of one check of one subject: an engine, a position in a file, or all endpoints.

    subject  what was checked, such as an endpoint's name
    check    name of the check
    seen     what the check observed
    fix      what the operator should do about it; "" if nothing
    """

    subject: str
    check: str
    verdict: CheckVerdict
    seen: str
    fix: str = ""


def pass_finding(subject: str, check: str, seen: str) -> CheckFinding:
    """Return the finding of a `doctor` check that passed; `seen` is what was observed."""
    return CheckFinding(subject, check, CheckVerdict.PASS, seen)


def warn_finding(subject: str, check: str, seen: str, fix: str) -> CheckFinding:
    """Return the finding of a `doctor` check that passed with a warning; `fix` is what to do."""
    return CheckFinding(subject, check, CheckVerdict.WARN, seen, fix)


def fail_finding(subject: str, check: str, seen: str, fix: str) -> CheckFinding:
    """Return the finding of a `doctor` check that failed; `fix` is what to do."""
    return CheckFinding(subject, check, CheckVerdict.FAIL, seen, fix)


def unknown_finding(subject: str, check: str, seen: str, fix: str) -> CheckFinding:
    """Return the finding of a check that cannot be decided from outside the engine."""
    return CheckFinding(subject, check, CheckVerdict.UNKNOWN, seen, fix)


MAX_SUBJECTS = 8
NAMED_SUBJECTS = 3
_SEVERITY = (CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.UNKNOWN, CheckVerdict.PASS)


def group_findings(findings: Sequence[CheckFinding]) -> list[CheckFinding]:
    """Merge equal findings about many subjects into one per check and verdict, worst ones first.

    With at most MAX_SUBJECTS subjects, the findings are returned unchanged.
    """
    if len({finding.subject for finding in findings}) <= MAX_SUBJECTS:
        return list(findings)
    groups: dict[tuple[CheckVerdict, str, str], list[CheckFinding]] = {}
    for finding in findings:
        groups.setdefault((finding.verdict, finding.check, finding.fix), []).append(finding)
    merged = [_merge(group) for group in groups.values()]
    return sorted(merged, key=lambda finding: _SEVERITY.index(finding.verdict))


def _merge(group: Sequence[CheckFinding]) -> CheckFinding:
    first, others = group[0], len(group) - NAMED_SUBJECTS
    subject = ", ".join(finding.subject for finding in group[:NAMED_SUBJECTS])
    if others > 0:
        subject += f" and {others} more"
    is_same = all(finding.seen == first.seen for finding in group)
    return msgspec.structs.replace(
        first, subject=subject, seen=first.seen if is_same else f"for example: {first.seen}"
    )
