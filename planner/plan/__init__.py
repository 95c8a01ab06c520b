"""The effect of a changed configuration on the last minutes: two replays of one access log, side by
side.
"""

from planner.plan.plan import Plan, PoolPlan, plan
from planner.plan.pool_case import Case, CaseError, Taken, cases
from planner.plan.recent import Recent, recent
from planner.plan.show import as_plain, show

__all__ = [
    "Case",
    "CaseError",
    "Plan",
    "PoolPlan",
    "Recent",
    "Taken",
    "as_plain",
    "cases",
    "plan",
    "recent",
    "show",
]
