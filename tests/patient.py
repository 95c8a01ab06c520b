"""Sections of a configuration for a gateway whose engines are alive and share a busy machine, or its very loop.

An engine that no test has broken must not be taken for dead because nobody had the processor for a second.
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
    """These sections, patient wherever they do not say otherwise."""
    return {
        **sections,
        **{name: usual | dict(sections.get(name, {})) for name, usual in PATIENT.items()},
    }
