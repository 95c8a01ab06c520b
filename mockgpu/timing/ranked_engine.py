"""RankedEngine: the parallel sizes of an engine, and the ranks that requests can address."""

from __future__ import annotations

from policies.sizing.parallel_layout import Layout


class RankedEngine:
    """Base class of descriptions of an engine whose requests can name a data-parallel rank.

    tp, pp, ep, dp, cp  the engine's parallel sizes
    ranks               number of data-parallel ranks that requests can address
    lockstep            whether the steps of these ranks begin and end together; None: if they share
                        their experts
    """

    __slots__ = ()

    tp: int
    pp: int
    ep: int
    dp: int
    cp: int
    ranks: int
    lockstep: bool | None

    @property
    def shares_experts(self) -> bool:
        """Return whether the ranks that requests can address share the model's experts.

        If not, every rank has all experts.
        """
        return self.ranks > 1 and self.ep > self.tp

    @property
    def is_lockstep(self) -> bool:
        """Return whether the steps of all addressable ranks begin and end together."""
        return self.shares_experts if self.lockstep is None else self.lockstep

    @property
    def layout(self) -> Layout:
        """Return the parallel layout by which step times are computed.

        It is that of the whole engine if its ranks share experts, otherwise that of one rank.
        """
        dp = self.ranks if self.shares_experts else self.dp
        return Layout(self.tp, self.pp, self.ep, dp, self.cp)
