"""Configuration sections with long time limits, for tests whose engines share a busy machine.

A healthy engine must not be considered dead because it got no CPU for a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATIENT: dict[str, Any] = {
    "timeouts": {"connect": "10s"},
    "health": {"timeout": "10s", "progress": "60s"},
    "scrape": {"timeout": "10s"},
}


def patient(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **sections,
        **{name: usual | dict(sections.get(name, {})) for name, usual in PATIENT.items()},
    }
