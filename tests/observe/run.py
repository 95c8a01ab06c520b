"""`make observe`: checks in a real Prometheus that every dashboard and alert query returns data.

Two gateways with mock engines serve some traffic. One has faults, a full wait queue and a refused
configuration; the other one splits requests. Prometheus scrapes them every second. Then every query
of every panel and rule is run.

It needs Debian's package prometheus and half a minute, so it is not part of `make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.e2e.split_fleet import SENTENCE, SplitFleet, split_fleet
from tests.ports import free_port
from tests.unit.tools.monitoring.test_live_scrape import (
    WITHOUT_CHILDREN,
    Seen,
    cause_every_event,
    handwritten_queries,
    record_series,
)
from tools.monitoring.dashboards import family_name
from tools.monitoring.files import RULES, queries
from tools.monitoring.grafana import filter_by_variables
from tools.monitoring.promql import fill_variables, find_selectors

ROOT = Path(__file__).parents[2]
SECONDS = 20
READY_WITHIN_S = 30.0

CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: penstock
    static_configs: [{{targets: ["{one}", "{other}"]}}]
"""


async def main(prometheus: str) -> int:
    # Run the check; return 0 if every query that can have data has some.
    room = {"waiting_room": {"size": 2, "timeout": "10s"}, "policy": "prefix_aware"}
    async with (
        gateway_fleet(2, concurrency=2, pool=room) as fleet,
        split_fleet("vllm_nixl", groups=(1, 1)) as halves,
    ):
        targets = [each.app.admin_url.removeprefix("http://") for each in (fleet, halves)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prometheus.yml"
            file.write_text(CONFIG.format(rules=ROOT / RULES, one=targets[0], other=targets[1]))
            port = free_port()
            process = await started(prometheus, folder, file, port)
            try:
                await asyncio.gather(traffic(fleet, halves), ready(fleet.http, port))
                return await judged(fleet, halves, port)
            finally:
                process.terminate()
                await asyncio.wait_for(process.wait(), 10)


async def started(
    prometheus: str, folder: str, file: Path, port: int
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(
            prometheus,
            f"--config.file={file}",
            f"--storage.tsdb.path={folder}/data",
            "--log.level=error",
        ),
        *(f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"),
    )


async def ready(http: aiohttp.ClientSession, port: int) -> None:
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            with suppress(aiohttp.ClientError):
                async with http.get(f"http://127.0.0.1:{port}/-/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


async def traffic(fleet: GatewayFleet, halves: SplitFleet) -> None:
    # Send a few requests of every kind, so that all counters exist from the first scrapes on.
    #
    # Afterwards, send further ordinary requests.
    await cause_every_event(fleet)
    for member in fleet.groups:
        member.faults.apply("")
    for number in range(SECONDS * 2):
        await fleet.ask(stream=bool(number % 2), prompt=f"question {number}")
        await halves.assert_right_answer(
            {"prompt": f"{number} " + SENTENCE * 30, "max_tokens": 4, "stream": True}
        )
        await asyncio.sleep(0.5)


async def judged(fleet: GatewayFleet, halves: SplitFleet, port: int) -> int:
    # Run all queries, print those without data, and return the exit status.
    #
    # A query generated from the catalogue may lack data if its metric has no series yet.
    seen: Seen = defaultdict(set)
    for each in (fleet, halves):
        record_series(each.app.metrics.render().decode(), seen)
    url, hand = f"http://127.0.0.1:{port}/api/v1", handwritten_queries()
    catalogue = fleet.app.metrics.catalogue()
    labelled = {spec.name for spec in catalogue if spec.labels}
    empty: list[str] = []
    excused: set[str] = set()
    unknown = asked_for = 0
    for where, query in queries().items():
        sent = fill_variables(
            filter_by_variables(query, catalogue) if where.startswith("penstock-") else query, "10s"
        )
        found = await answer_of(fleet.http, f"{url}/query", query=sent)
        asked_for += 1
        unknown += bool(found) and all(math.isnan(float(one["value"][1])) for one in found)
        if not found:
            silent = {
                each.name
                for each in find_selectors(query)
                if family_name(each.name) in labelled and not seen[each.name]
            }
            excused |= silent
            if not silent or (query in hand and not silent <= WITHOUT_CHILDREN.keys()):
                empty.append(f"{where}: {query}")
    rules = [
        rule
        for group in (await data(fleet.http, f"{url}/rules"))["groups"]
        for rule in group["rules"]
    ]
    ill = [rule["name"] for rule in rules if rule["health"] != "ok"]
    marks = await data(
        fleet.http,
        f"{url}/query_exemplars",
        query="penstock_ttft_seconds_bucket",
        start="0",
        end="9e9",
    )
    print(
        f"{asked_for} queries, {len(empty)} without data, {unknown} of nothing but NaN (no observation in 10 s)"
    )
    print(f"without a series so far: {', '.join(sorted(excused)) or 'none'}")
    print(
        f"{len(rules)} rules, {len(ill)} ill; {sum(len(each['exemplars']) for each in marks)} exemplars of TTFT stored"
    )
    for line in (*empty, *ill):
        print(f"NO DATA  {line}")
    return int(bool(empty or ill or not marks))


async def answer_of(http: aiohttp.ClientSession, url: str, **params: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = (await data(http, url, **params))["result"]
    return result


async def data(http: aiohttp.ClientSession, url: str, **params: str) -> Any:
    async with http.get(url, params=params) as answer:
        told = await answer.json()
        assert told["status"] == "success", (params, told)
        return told["data"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Run every query of dashboards and rules in a real Prometheus."
    )
    parser.add_argument(
        "--prometheus",
        default="prometheus",
        help="path of the Prometheus program (default: prometheus)",
    )
    sys.exit(asyncio.run(main(parser.parse_args().prometheus)))
