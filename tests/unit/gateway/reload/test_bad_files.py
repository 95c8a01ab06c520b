"""Tests that two hundred invalid files are rejected with the line of their mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.unit.gateway.reload.running import running

GOOD = """\
version: 1
listeners:
  api: {{port: 0}}
  admin: {{port: 0}}
models:
  - name: demo-8b
    pool: chat
    aliases: [demo, small]
    context_tokens: 32768
pools:
  chat:
    policy: {policy}
    endpoints:
      - url: {url}
        name: group-0
        role: both
        engine: vllm
        max_concurrency: 24
        layout: {{tp: 2, pp: 1, ep: 1, dp: 1}}
        labels: {{zone: a}}
    waiting_room:
      size: 256
      timeout: 30s
limits:
  body: 32MiB
  body_budget: 512MiB
  body_chunks: 16384
timeouts:
  connect: 1s
  first_byte: 600s
  stall: 60s
retries:
  budget: 0.2
  floor: 3
  attempts: 3
health:
  interval: 1s
  failures: 3
  backoff: 1s
  backoff_max: 60s
  path: /health
scrape:
  interval: 1s
prefix:
  index: 64MiB
  block_bytes: 512
observability:
  access_log: 'off'
reload:
  watch: true
"""


class Mistake(NamedTuple):
    """A kind of mistake in a configuration file.

    `make` puts it into one line, whose number must be reported. It returns None for lines where the
    mistake is impossible.
    """

    name: str
    make: Callable[[str], str | None]


def value(of: Callable[[str], bool], wrong: str) -> Callable[[str], str | None]:
    def spoil(line: str) -> str | None:
        key, colon, text = line.partition(": ")
        return (
            f"{key}: {wrong}"
            if colon and of(text) and "{" not in text and "[" not in text
            else None
        )

    return spoil


def duration(text: str) -> bool:
    return text[:-1].isdigit() and text.endswith("s")


def size(text: str) -> bool:
    return text.endswith("MiB")


def number(text: str) -> bool:
    return text.isdigit()


MISTAKES = (
    Mistake("duration without unit", value(duration, "5")),
    Mistake("duration misspelt", value(duration, "5secs")),
    Mistake("duration of nothing", value(duration, "0s")),
    Mistake("duration negative", value(duration, "-5s")),
    Mistake("duration a list", value(duration, "[5s]")),
    Mistake("size without unit", value(size, "5")),
    Mistake("size misspelt", value(size, "32 megs")),
    Mistake("number in quotes", value(number, '"5"')),
    Mistake("number negative", value(number, "-7")),
    Mistake("number with a fraction", value(number, "1.5")),
    Mistake("number a word", value(number, "many")),
    Mistake("number a truth", value(number, "true")),
    Mistake("value a mapping", value(lambda text: bool(text), "{a: 1}")),
    Mistake("value missing", value(lambda text: bool(text), "")),
    Mistake("unknown variable", value(lambda text: bool(text), "${NO_SUCH_NAME}")),
    Mistake("reference malformed", value(lambda text: bool(text), "${not a name}")),
    Mistake("python tag", value(lambda text: bool(text), "!!python/object:os.system {}")),
    Mistake(
        "key misspelt",
        lambda line: None if line.lstrip().startswith("-") else line.replace(":", "x:", 1),
    ),
    Mistake(
        "key twice", lambda line: f"{line}\n{line}" if ": " in line and "- " not in line else None
    ),
    Mistake("tab", lambda line: f"\t{line}" if line.startswith("  ") else None),
    Mistake("quote left open", value(lambda text: bool(text), '"abc')),
    Mistake("bracket left open", value(lambda text: bool(text), "[1, 2")),
    Mistake("anchor unknown", value(lambda text: bool(text), "*nowhere")),
)
ELSEWHERE = frozenset({"version", "pool", "- name", "url", "role", "policy", "chat"})
"""Keys whose mistakes may be reported at other keys, which depend on them."""

OPTIONAL = frozenset({"context_tokens", "name"})
"""Configuration keys whose value may be empty."""

MOST_OF_A_KIND = 11


def corpus(good: str) -> Iterator[tuple[str, int, str]]:
    lines = good.splitlines()
    for mistake in MISTAKES:
        harness = 0
        for index, line in enumerate(lines):
            spoilt, key = mistake.make(line), line.strip().partition(":")[0]
            allowed = key in ELSEWHERE or (mistake.name == "value missing" and key in OPTIONAL)
            if spoilt is None or spoilt == line or allowed or harness == MOST_OF_A_KIND:
                continue
            harness += 1
            place = index + 2 if mistake.name == "key twice" else index + 1
            yield (
                f"{mistake.name}: {line.strip()}",
                place,
                "\n".join([*lines[:index], spoilt, *lines[index + 1 :], ""]),
            )


async def test_two_hundred_bad_files_are_each_rejected_at_their_line_without_effect_on_requests(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        url = harness.members[0].url
        good = GOOD.format(policy="prefix_aware", url=url)
        files = list(corpus(good))
        assert len(files) >= 200
        status, reply = await harness.put(good)
        assert status == 200, reply
        snapshot, wrong = harness.app.gateway.snapshot, []
        async with harness.load(users=2):
            for name, line, text in files:
                outcome = await harness.app.reloader.put(text.encode(), "admin")
                matches = [problem.line for problem in outcome.problems]
                if outcome.result != "rejected" or line not in matches:
                    wrong.append((name, line, outcome.result, matches))
                await asyncio.sleep(0)
        assert wrong == []
        assert harness.app.gateway.snapshot is snapshot
        assert harness.fates["ok"] > 20
        assert len(
            [line for line in harness.said if line.startswith("rejected PUT config:")]
        ) == len(files)
