"""The report of a benchmark run as JSON, with additional names for other tools.

Names at the top level are those of vLLM's and SGLang's benchmarks. The members `guidellm` and
`aiperf` have the same numbers with the names and definitions of those tools, for comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from planner.bench.bench_options import BenchPlan, BenchSlo
from planner.bench.client import BenchRecord
from planner.bench.percentiles import Summary, convert_unit, summarise


def is_good(record: BenchRecord, slo: BenchSlo) -> bool:
    """Return whether a request succeeded within the latency limits.

    The limit per token (TPOT) does not apply to an answer of one token.
    """
    if record.error is not None or record.ttft_s is None:
        return False
    if slo.ttft_s is not None and record.ttft_s > slo.ttft_s:
        return False
    return slo.tpot_s is None or record.tpot_s is None or record.tpot_s <= slo.tpot_s


class BenchReport:
    """The result of one benchmark run. Times are in seconds; None: nothing was measured."""

    def __init__(
        self,
        plan: BenchPlan,
        records: Sequence[BenchRecord],
        peak: int = 0,
        interrupted: bool = False,
    ) -> None:
        self.plan = plan
        self.records = records
        self.peak = peak
        self.interrupted = interrupted
        self.completed = [record for record in records if record.error is None]
        self.errors = dict(Counter(record.error for record in records if record.error is not None))
        began = min((record.due_s for record in records), default=0.0)
        ended = max((record.ended_s for record in records), default=0.0)
        self.duration_s = max(ended - began, 0.0)
        self.ttft = summarise(
            [record.ttft_s for record in self.completed if record.ttft_s is not None]
        )
        self.tpot = summarise(
            [record.tpot_s for record in self.completed if record.tpot_s is not None]
        )
        self.itl = summarise([gap for record in self.completed for gap in record.gaps_s])
        self.e2e = summarise([record.e2e_s for record in self.completed])
        self.lag = summarise([record.lag_s for record in records])

    @property
    def prompt_tokens(self) -> int:
        return sum(record.prompt_tokens or 0 for record in self.completed)

    @property
    def output_tokens(self) -> int:
        return sum(record.output_tokens for record in self.completed)

    @property
    def cached_ratio(self) -> float | None:
        """Return the share of prompt tokens that came from prefix caches, 0 to 1.

        Answers that do not report cached tokens are left out. Returns None if no answer reports
        them.
        """
        reporting = [record for record in self.completed if record.cached_tokens is not None]
        prompt = sum(record.prompt_tokens or 0 for record in reporting)
        return sum(record.cached_tokens or 0 for record in reporting) / prompt if prompt else None

    @property
    def good(self) -> int:
        return sum(is_good(record, self.plan.slo) for record in self.records)

    @property
    def good_fraction(self) -> float:
        return self.good / len(self.records) if self.records else 0.0

    def per_second(self, amount: float) -> float:
        return amount / self.duration_s if self.duration_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the whole report as a JSON object, without the records of single requests."""
        return {
            "schema": "penstock-bench/1",
            "plan": _plain(self.plan),
            "interrupted": self.interrupted,
            **_vllm(self),
            "errors": self.errors,
            "good_request_fraction": self.good_fraction,
            "cached_token_ratio": self.cached_ratio,
            "send_lag_ms": _ms(self.lag),
            "guidellm": _guidellm(self),
            "aiperf": _aiperf(self),
        }


def _plain(plan: BenchPlan) -> Any:
    without_key = msgspec.structs.replace(plan, api_key=None)
    return msgspec.to_builtins(without_key, enc_hook=str)


def _ms(summary: Summary | None) -> dict[str, float] | None:
    return None if summary is None else msgspec.to_builtins(convert_unit(summary, 1e3))


def _vllm(report: BenchReport) -> dict[str, Any]:
    # Return the results under the names of `vllm bench serve` and `sglang.bench_serving`, in ms.
    #
    # `e2el` equals `e2e_latency`.
    flat: dict[str, Any] = {
        "duration": report.duration_s,
        "completed": len(report.completed),
        "failed": len(report.records) - len(report.completed),
        "total_input_tokens": report.prompt_tokens,
        "total_output_tokens": report.output_tokens,
        "request_throughput": report.per_second(len(report.completed)),
        "request_goodput": report.per_second(report.good),
        "goodput": report.per_second(report.good),
        "output_throughput": report.per_second(report.output_tokens),
        "total_token_throughput": report.per_second(report.prompt_tokens + report.output_tokens),
        "max_concurrent_requests": report.peak,
    }
    metrics = {"ttft": report.ttft, "tpot": report.tpot, "itl": report.itl}
    for name, summary in {**metrics, "e2el": report.e2e, "e2e_latency": report.e2e}.items():
        for statistic, key in (("mean", "mean"), ("std", "std"), ("median", "p50")):
            flat[f"{statistic}_{name}_ms"] = (
                None if summary is None else getattr(summary, key) * 1e3
            )
        for percent in ("p50", "p90", "p95", "p99"):
            flat[f"{percent}_{name}_ms"] = (
                None if summary is None else getattr(summary, percent) * 1e3
            )
    return flat


def _guidellm(report: BenchReport) -> dict[str, Any]:
    # Return the results under guidellm's names.
    #
    # guidellm includes the first token in time_per_output_token (whole latency over all tokens),
    # and averages the gaps of a request for inter_token_latency.
    whole = [
        record.e2e_s / record.output_tokens for record in report.completed if record.output_tokens
    ]
    return {
        "time_to_first_token_ms": _ms(report.ttft),
        "inter_token_latency_ms": _ms(report.tpot),
        "time_per_output_token_ms": _ms(summarise(whole)),
        "request_latency": None if report.e2e is None else msgspec.to_builtins(report.e2e),
        "requests_per_second": report.per_second(len(report.completed)),
        "output_tokens_per_second": report.per_second(report.output_tokens),
        "request_concurrency": report.per_second(sum(record.e2e_s for record in report.completed)),
        "request_goodput": report.per_second(report.good),
    }


def _aiperf(report: BenchReport) -> dict[str, Any]:
    # Return the results under aiperf's names: an object with a unit for each name.
    #
    # inter_token_latency is a request's mean after its first token.
    times = {
        "time_to_first_token": report.ttft,
        "inter_token_latency": report.tpot,
        "request_latency": report.e2e,
    }
    records: dict[str, Any] = {}
    for tag, summary in times.items():
        if summary is not None:
            plain = _ms(summary) or {}
            records[tag] = {"unit": "ms", "avg": plain.pop("mean"), **plain}
    rates = {
        "output_token_throughput": ("tokens/sec", report.per_second(report.output_tokens)),
        "request_throughput": ("requests/sec", report.per_second(len(report.completed))),
        "goodput": ("requests/sec", report.per_second(report.good)),
        "good_request_fraction": ("ratio", report.good_fraction),
        "request_count": ("requests", len(report.completed)),
        "error_request_count": ("requests", len(report.records) - len(report.completed)),
    }
    return records | {tag: {"unit": unit, "avg": value} for tag, (unit, value) in rates.items()}
