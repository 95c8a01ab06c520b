"""Load on an OpenAI server, and its results: `await run(plan)` returns a Report.

Contains workloads, open and closed loop, timing of streamed answers, and JSON for other tools.
Trace readers are in planner/traces, the comparison with other gateways in bench.
"""

from planner.bench.client import BenchError, Client, Record
from planner.bench.loops import Progress, run
from planner.bench.plan import Plan, PlanError, Slo, checked
from planner.bench.report import Report, is_good
from planner.bench.stats import Summary, percentile, summarise
from planner.bench.timeline import Timeline

__all__ = [
    "BenchError",
    "Client",
    "Plan",
    "PlanError",
    "Progress",
    "Record",
    "Report",
    "Slo",
    "Summary",
    "Timeline",
    "checked",
    "is_good",
    "percentile",
    "run",
    "summarise",
]
