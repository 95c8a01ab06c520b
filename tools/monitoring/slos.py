"""Service level objectives (SLOs), and alerts that fire if their error budget is used up too fast.

The error budget is the share of requests that may fail, such as 1% for an objective of 99%. The
burn rate is how fast it is used up; at 1, it lasts exactly 30 days.

An alert fires while the burn rate is above a limit in both a long and a short window. The short
window lets the alert start and end quickly. The limits and windows are those of Google's SRE
workbook.
"""

from __future__ import annotations

import msgspec

from tools.monitoring.promql import rate

BUDGET_LABELS = "job, namespace, model, pool"
"""Labels that identify an error budget: each model of each fleet has a budget of its own."""

WINDOWS = ("5m", "30m", "1h", "6h", "3d")
TTFT_MISSED, TPOT_MISSED = "~ttft_missed|both_missed", "~tpot_missed|both_missed"
JUDGED_OUTCOMES = "~met|ttft_missed|tpot_missed|both_missed"


class Objective(msgspec.Struct, frozen=True):
    """A service level objective (SLO), such as 99% of first tokens in time.

    slo      value of the label `slo`: "ttft", "tpot" or "availability"
    alert    name of its alerts and of their runbook
    goal     share of requests that must meet the objective, from 0 to 1
    summary  text of its alerts
    """

    slo: str
    alert: str
    goal: float
    summary: str

    def bad_share(self, window: str) -> str:
        if self.slo == "availability":
            total = rate("penstock_requests_total", BUDGET_LABELS, window, code="~200|5..")
            failed = rate("penstock_requests_total", BUDGET_LABELS, window, code="~5..")
            broken = rate(
                "penstock_requests_total", BUDGET_LABELS, window, code="200", reason="!served"
            )
            return f"(({failed} or 0 * {total}) + ({broken} or 0 * {total})) / {total}"
        total = rate("penstock_goodput_total", BUDGET_LABELS, window, slo_outcome=JUDGED_OUTCOMES)
        outcomes = TTFT_MISSED if self.slo == "ttft" else TPOT_MISSED
        missed = rate("penstock_goodput_total", BUDGET_LABELS, window, slo_outcome=outcomes)
        return f"({missed} or 0 * {total}) / {total}"

    def recorded_series(self, window: str) -> str:
        """Return the Prometheus series that has the share of requests which miss the objective.

        window  one of WINDOWS, the period over which the share is computed
        """
        return f'penstock:slo_errors:ratio_rate{window}{{slo="{self.slo}"}}'

    def budget_left(self) -> str:
        """Return the PromQL query for the share of the error budget that is left (three days)."""
        return f"1 - {self.recorded_series('3d')} / {1 - self.goal:.6g}"


class Burn(msgspec.Struct, frozen=True):
    """An alert that fires if an objective's error budget is used up too fast.

    The error budget is the share of requests that may fail. The alert fires if both windows use it
    up more than `factor` times too fast. Durations are in Prometheus notation, such as "1h".

    long      the long window
    short     the short window, which lets the alert start and end quickly
    hold      how long both must exceed the limit before the alert fires
    severity  "page" to wake an operator, or "ticket"
    """

    factor: float
    long: str
    short: str
    hold: str
    severity: str

    def limit(self, objective: Objective) -> str:
        """Return the share of failed requests above which this alert fires, as text for the rule.

        For example 14.4 times the error budget of 1% is "0.144".
        """
        return f"{self.factor * (1 - objective.goal):.6g}"

    def rule(self, objective: Objective) -> str:
        limit = self.limit(objective)
        long, short = objective.recorded_series(self.long), objective.recorded_series(self.short)
        return f"{long} > {limit} and {short} > {limit}"


OBJECTIVES = (
    Objective(
        "ttft",
        "PenstockTtftBurn",
        0.99,
        "Too many first tokens are late: the error budget burns too fast.",
    ),
    Objective(
        "tpot",
        "PenstockTpotBurn",
        0.99,
        "Too many streams are slow: the error budget burns too fast.",
    ),
    Objective(
        "availability",
        "PenstockAvailabilityBurn",
        0.999,
        "Too many requests fail or break off: the error budget burns too fast. Refusals do not "
        "count.",
    ),
)

BURNS = (
    Burn(14.4, "1h", "5m", "2m", "page"),
    Burn(6.0, "6h", "30m", "15m", "page"),
    Burn(1.0, "3d", "6h", "1h", "ticket"),
)
