"""Reads a YAML file that describes a mix: traces, each with its rate, period and class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from planner.traces.mix import MixPart
from planner.traces.recorded_request import TraceRequest
from planner.traces.trace_lines import TraceError


class MixMember(msgspec.Struct, forbid_unknown_fields=True):
    """One trace of a mix, as the YAML file describes it.

    trace   path of the trace, relative to the YAML file
    format  format of the trace; None: it is detected

    The other fields are those of MixPart.
    """

    trace: str
    format: str | None = None
    rate: float = 1.0
    from_s: float = 0.0
    to_s: float | None = None
    slo: str | None = None
    tenant: str | None = None
    priority: int | None = None

    def part(self, requests: Sequence[TraceRequest]) -> MixPart:
        """Return a MixPart with these requests of the trace and the changes to make to them."""
        return MixPart(
            requests, self.rate, self.from_s, self.to_s, self.slo, self.tenant, self.priority
        )


def read_mix_file(path: Path) -> list[MixMember]:
    """Return the parts of the mix that a YAML file describes.

    Raises TraceError if the file cannot be read, or is not a list of traces.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return msgspec.convert(YAML(typ="safe", pure=True).load(path.read_text()), list[MixMember])
    except (YAMLError, OSError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise TraceError(f"{path}: {error}") from None
