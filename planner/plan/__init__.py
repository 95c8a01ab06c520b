"""Compares two gateway configurations by replaying the last minutes of an access log with both."""

from planner.plan.comparison import ConfigComparison, PoolComparison, plan
from planner.plan.config_to_replay import Assumptions, PoolCase, PoolCaseError, cases
from planner.plan.recent_traffic import RecentTraffic, recent
from planner.plan.show import as_plain, show

__all__ = [
    "Assumptions",
    "ConfigComparison",
    "PoolCase",
    "PoolCaseError",
    "PoolComparison",
    "RecentTraffic",
    "as_plain",
    "cases",
    "plan",
    "recent",
    "show",
]
