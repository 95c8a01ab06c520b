"""Numbers the production checks of `penstock doctor` like items 86 to 97 of `penstock seeds`.

`penstock seeds` lists statements about LLM serving. These items come from a guide to tensor
parallelism. production_checklist.py makes the findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from gateway.cli.doctor.findings import CheckFinding, CheckVerdict

ITEM_OF_CHECK: Mapping[str, int] = MappingProxyType(
    {
        "TP degree fits weights and KV": 86,
        "KV size as computed": 86,
        "TP within one fast domain": 87,
        "decode speed at batch 1 and 16": 88,
        "collective time per layer": 89,
        "TP size configured": 90,
        "admission control with chunked prefill": 91,
        "fallback to a smaller model": 92,
        "quality of quantised weights": 93,
        "KV memory monitored": 94,
        "context length as configured": 95,
        "a lost GPU fails fast": 96,
        "cost against replicas of a smaller model": 97,
    }
)


def seed_findings(findings: Sequence[CheckFinding]) -> list[CheckFinding]:
    """Return the production checklist's findings in the order of its items, with their numbers.

    Problems of the configuration file and of unreachable engines come first: they explain why other
    items have no result.
    """
    numbered = [
        (ITEM_OF_CHECK[finding.check], finding)
        for finding in findings
        if finding.check in ITEM_OF_CHECK
    ]
    others = [
        finding
        for finding in findings
        if finding.check in ("configuration", "reachable")
        and finding.verdict is not CheckVerdict.PASS
    ]
    return others + [
        msgspec.structs.replace(finding, check=f"{number} {finding.check}")
        for number, finding in sorted(numbered, key=lambda pair: pair[0])
    ]
