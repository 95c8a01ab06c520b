"""Configuration sections with long timeouts, for engines that share a busy machine or the event
loop.

Without them, a gateway may eject a working engine that got no CPU for a second.
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
    """Return these sections, with long timeouts where they set none."""
    return {
        **sections,
        **{name: usual | dict(sections.get(name, {})) for name, usual in PATIENT.items()},
    }
