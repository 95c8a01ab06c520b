"""Mooncake's Conductor: least time to the first token."""

from __future__ import annotations

from collections.abc import Sequence

from policies import pickers
from policies.contract import Policy, Weighted
from policies.model import Ask, Candidate
from policies.presets import ORDINARY, Preset
from policies.published.view import held, ttfts


class Mooncake(Preset, frozen=True):
    """Least expected time to the first token: queue, then the prefill of what is not cached there. No parameters.

    Mooncake (FAST'25), algorithm 1, with a roofline of the hardware in place of its offline polynomial, and
    without its transfer branch: engines take another's prefix only in a handoff from prefill to decode, so a prefix
    cannot be pulled for a request that is then computed elsewhere. Its rejections are an admission, `early_rejection`.
    """

    def build(self) -> Policy:
        return Policy(
            name="mooncake",
            filters=ORDINARY,
            scorers=(Weighted(soonest),),
            picker=pickers.best,
            reads_prefix=True,
            reads_beliefs=True,
        )


def soonest(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
    """Minus the expected TTFT, seconds."""
    return [-seconds for seconds in ttfts(ask, candidates, held(ask, candidates))]
