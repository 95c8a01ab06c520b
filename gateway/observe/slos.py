"""What is promised to whoever watches: three objectives, their recording rules, and alerts on how fast budgets burn.

An alert fires while the budget of errors burns faster than `factor` in a long window and still does
in a short one, so that it comes soon and ends soon. Factors and windows: the SRE workbook's, for a
budget of 30 days.
"""

from __future__ import annotations

import msgspec

from gateway.observe.promql import rate

PER = "job, namespace, model, pool"
"""Each model of each fleet has a budget of its own."""

WINDOWS = ("5m", "30m", "1h", "6h", "3d")
TTFT_MISSED, TPOT_MISSED = "~ttft_missed|both_missed", "~tpot_missed|both_missed"
JUDGED = "~met|ttft_missed|tpot_missed|both_missed"


class Objective(msgspec.Struct, frozen=True):
    """A share of requests, `goal`, that has to be good.

    `slo` is its label; `alert` names its alerts and runbook.
    """

    slo: str
    alert: str
    goal: float
    summary: str

    def bad_share(self, window: str) -> str:
        """Of what counts, the share that was bad."""
        if self.slo == "availability":
            every = rate("penstock_requests_total", PER, window, code="~200|5..")
            failed = rate("penstock_requests_total", PER, window, code="~5..")
            cut = rate("penstock_requests_total", PER, window, code="200", reason="!served")
            return f"(({failed} or 0 * {every}) + ({cut} or 0 * {every})) / {every}"
        every = rate("penstock_goodput_total", PER, window, kept=JUDGED)
        missed = rate("penstock_goodput_total", PER, window, kept=TTFT_MISSED if self.slo == "ttft" else TPOT_MISSED)
        return f"({missed} or 0 * {every}) / {every}"

    def recorded(self, window: str) -> str:
        """The same, as its recording rule calls it."""
        return f'penstock:slo_errors:ratio_rate{window}{{slo="{self.slo}"}}'

    def budget_left(self) -> str:
        """Of the newest three days' budget, the share that is left."""
        return f"1 - {self.recorded('3d')} / {1 - self.goal:.6g}"


class Burn(msgspec.Struct, frozen=True):
    """How fast is too fast: `factor` times the speed that would just use the budget up."""

    factor: float
    long: str
    short: str
    hold: str
    severity: str

    def limit(self, objective: Objective) -> str:
        """The share of errors at which it burns so fast."""
        return f"{self.factor * (1 - objective.goal):.6g}"

    def rule(self, objective: Objective) -> str:
        """The alert's expression."""
        limit = self.limit(objective)
        return f"{objective.recorded(self.long)} > {limit} and {objective.recorded(self.short)} > {limit}"


OBJECTIVES = (
    Objective(
        "ttft", "PenstockTtftBurn", 0.99, "First tokens come later than promised, faster than the budget allows."
    ),
    Objective(
        "tpot", "PenstockTpotBurn", 0.99, "Tokens follow more slowly than promised, faster than the budget allows."
    ),
    Objective(
        "availability",
        "PenstockAvailabilityBurn",
        0.999,
        "Requests fail or are cut off, faster than the budget allows; sheds are not counted.",
    ),
)

BURNS = (
    Burn(14.4, "1h", "5m", "2m", "page"),
    Burn(6.0, "6h", "30m", "15m", "page"),
    Burn(1.0, "3d", "6h", "1h", "ticket"),
)
