"""The command `penstock golden run`: compares a candidate engine's answers with a base engine's.

Exit status:

- 0: the candidate is as good as the base engine
- 1: an engine does not answer
- 2: wrong usage
- 3: the candidate is worse
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from command_line import Argument, Option, UsageError, write_line
from planner.golden.client import ComparedEngine, first_model, send_to_all
from planner.progress_bar import progress_bar
from policies.golden.answers import GoldenAnswer, GoldenError, read_prompts
from policies.golden.compare import GoldenReport, compare, judge

Action = Annotated[
    str,
    Argument(help="What to do: run (send the prompts to both engines, and compare the answers)."),
]
File = Annotated[
    Path,
    Argument(help="File with prompts as JSON Lines: one chat or completion request per line."),
]
Base = Annotated[
    str,
    Option("--base", help="URL of the base engine, with which the candidate is compared."),
]
Candidate = Annotated[
    str, Option("--candidate", help="URL of the candidate engine, which is evaluated.")
]
Model = Annotated[
    str | None,
    Option(
        "--model",
        help=(
            "Model to request from both engines. Default: the first model that each engine lists."
        ),
    ),
]
Key = Annotated[
    str,
    Option(
        "--key",
        envvar="PENSTOCK_ENGINE_KEY",
        help="API key that is sent to both engines as a bearer token.",
    ),
]
MaxTokens = Annotated[
    int,
    Option("--max-tokens", min=1, max=32_768, help="Maximum number of tokens per answer."),
]
Concurrency = Annotated[
    int,
    Option(
        "--concurrency",
        min=1,
        max=256,
        help="Maximum number of prompts that are sent at the same time.",
    ),
]
Tolerance = Annotated[
    float,
    Option(
        "--fail-if-worse",
        min=0,
        max=100,
        metavar="POINTS",
        help="Tolerated loss beyond chance, in percentage points (of the KL divergence: in "
        "hundredths of a nat). If the candidate loses more, the exit status is 3.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print the report as JSON instead of text.")]


def golden(
    action: Action,
    file: File,
    base: Base,
    candidate: Candidate,
    model: Model = None,
    key: Key = "",
    max_tokens: MaxTokens = 128,
    concurrency: Concurrency = 4,
    fail_if_worse: Tolerance = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compare a candidate engine's answers to golden prompts with those of a base engine.

    The base engine answers twice. The difference between its two answers shows what is chance.
    """
    if action != "run":
        raise UsageError(f"unknown action {action!r}; the only action is run")
    try:
        prompts = read_prompts(file.read_text().splitlines())
    except (OSError, UnicodeDecodeError, GoldenError) as error:
        write_line(f"penstock golden: {file}: {error}", err=True)
        raise SystemExit(2) from None
    try:
        with progress_bar(as_json) as show_progress:
            asked = _answers_of_engines(
                prompts, (base, candidate), (model, key), (max_tokens, concurrency)
            )
            first, other, again = asyncio.run(asked(lambda share: show_progress("prompts", share)))
    except GoldenError as error:
        write_line(f"penstock golden: {error}", err=True)
        raise SystemExit(1) from None
    report = report_of(prompts, first, other, again, fail_if_worse / 100)
    write_line(json.dumps(_plain(report), indent=2) if as_json else "\n".join(_lines(report)))
    raise SystemExit(3 if report.is_worse else 0)


def _answers_of_engines(
    prompts: list[dict[str, Any]],
    urls: tuple[str, str],
    access: tuple[str | None, str],
    limits: tuple[int, int],
) -> Callable[[Callable[[float], None]], Any]:
    async def run(on_progress: Callable[[float], None]) -> list[list[GoldenAnswer]]:
        (model, key), (max_tokens, concurrency) = access, limits
        base, candidate = [
            ComparedEngine(url, model or await first_model(url, key), key) for url in urls
        ]
        engines = (base, candidate, base)
        return await send_to_all(engines, prompts, max_tokens, concurrency, on_progress)

    return run


def report_of(
    prompts: list[dict[str, Any]],
    base: list[GoldenAnswer],
    candidate: list[GoldenAnswer],
    again: list[GoldenAnswer],
    tolerance: float,
) -> GoldenReport:
    """Compare a candidate engine's answers with those of the base engine, and return the report.

    prompts    the prompts
    base       the base engine's answers
    candidate  the candidate's answers
    again      the base engine's second answers, which show what is chance
    tolerance  accepted difference beyond chance
    """
    floors = [compare(*three) for three in zip(prompts, base, again, strict=True)]
    pairs = [compare(*three) for three in zip(prompts, base, candidate, strict=True)]
    took_s = [sum(answer.took_s for answer in each) / len(each) for each in (base, candidate)]
    return judge(floors, pairs, tolerance, (took_s[0], took_s[1]))


def _plain(report: GoldenReport) -> dict[str, Any]:
    members: dict[str, Any] = msgspec.to_builtins(report)
    return members | {"is_worse": report.is_worse}


def _lines(report: GoldenReport) -> Iterator[str]:
    yield f"{report.prompts} prompts; the base was asked twice, which gives the noise floor"
    yield f"{'measure':<28}{'base again':>12}{'candidate':>12}{'worse by':>12}{'+-':>10}"
    for each in report.measures:
        mark = "  WORSE" if each.is_worse else ""
        yield (
            f"{each.name:<28}{each.floor:>12.4f}{each.candidate:>12.4f}{each.worse_by:>12.4f}"
            f"{each.error:>10.4f}{mark}"
        )
    if report.median_divergence_at is not None:
        yield f"answers that differ do so after {report.median_divergence_at:g} tokens (median)"
    if report.length_ratio is not None:
        yield f"answers are {report.length_ratio:.2f} times as long"
    yield f"an answer takes {report.base_s:.2f} s, the candidate's {report.candidate_s:.2f} s"
    yield "worse than the base" if report.is_worse else "no worse than the base differs from itself"
