"""`make observe`: check with a real Prometheus that queries of dashboards and rules return data.

Prometheus scrapes two gateways with mock groups every second during light traffic. One has faults,
a full queue and a rejected configuration; the other splits requests. Then every query of every
panel and rule is sent. This takes half a minute and needs Debian's package, so it is not part of
`make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import socket
import sys
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.e2e.split_fleet import SENTENCE, SplitFleet, split_fleet
from tests.unit.tools.monitoring.test_live_scrape import (
    WITHOUT_CHILDREN,
    Seen,
    cause_every_event,
    handwritten_queries,
    record_series,
)
from tools.monitoring.dashboards import family_name
from tools.monitoring.files import RULES, queries
from tools.monitoring.grafana import filter_query
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
    """Run the check and return the exit status: 0 when every query that can have data has data."""
    queue = {"waiting_room": {"size": 2, "timeout": "10s"}, "policy": "prefix_aware"}
    async with (
        house(2, concurrency=2, pool=queue) as home,
        split_house("vllm_nixl", groups=(1, 1)) as halves,
    ):
        targets = [fleet.app.admin_url.removeprefix("http://") for fleet in (home, halves)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prometheus.yml"
            file.write_text(CONFIG.format(rules=ROOT / RULES, one=targets[0], other=targets[1]))
            port = free_port()
            process = await start_prometheus(prometheus, folder, file, port)
            try:
                await asyncio.gather(traffic(home, halves), ready(home.http, port))
                return await check_queries(home, halves, port)
            finally:
                process.terminate()
                await asyncio.wait_for(process.wait(), 10)


async def start_prometheus(
    prometheus: str, folder: str, file: Path, port: int
) -> asyncio.subprocess.Process:
    """Start Prometheus on a port of 127.0.0.1."""
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


async def traffic(home: House, halves: SplitHouse) -> None:
    """Cause every kind of event, so that all series exist, and then send ordinary requests."""
    await cause_every_event(home)
    for member in home.groups:
        member.faults.set("")
    for number in range(SECONDS * 2):
        await home.ask(stream=bool(number % 2), prompt=f"question {number}")
        await halves.right(
            {"prompt": f"{number} " + SENTENCE * 30, "max_tokens": 4, "stream": True}
        )
        await asyncio.sleep(0.5)


async def check_queries(home: House, halves: SplitHouse, port: int) -> int:
    """Send all queries and print those without data; return the exit status.

    A query generated from the catalogue may have no data if a family has no series yet.
    """
    seen: Seen = defaultdict(set)
    for fleet in (home, halves):
        record_series(fleet.app.metrics.render().decode(), seen)
    url, hand = f"http://127.0.0.1:{port}/api/v1", handwritten_queries()
    catalogue = home.app.metrics.catalogue()
    labelled = {spec.name for spec in catalogue if spec.labels}
    empty: list[str] = []
    excused: set[str] = set()
    unknown = count = 0
    for where, query in queries().items():
        sent = fill_variables(
            filter_query(query, catalogue) if where.startswith("penstock-") else query, "10s"
        )
        result = await answer_of(home.http, f"{url}/query", query=sent)
        count += 1
        unknown += bool(result) and all(math.isnan(float(item["value"][1])) for item in result)
        if not result:
            silent = {
                selector.name
                for selector in find_selectors(query)
                if family_of(selector.name) in labelled and not seen[selector.name]
            }
            excused |= silent
            if not silent or (query in hand and not silent <= WITHOUT_CHILDREN.keys()):
                empty.append(f"{where}: {query}")
    rules = [
        rule
        for group in (await data(home.http, f"{url}/rules"))["groups"]
        for rule in group["rules"]
    ]
    unhealthy = [rule["name"] for rule in rules if rule["health"] != "ok"]
    exemplars = await data(
        home.http,
        f"{url}/query_exemplars",
        query="penstock_ttft_seconds_bucket",
        start="0",
        end="9e9",
    )
    print(
        f"{count} queries, {len(empty)} without data, "
        f"{unknown} with only NaN (no observation in 10 s)"
    )
    print(f"families without series: {', '.join(sorted(excused)) or 'none'}")
    stored = sum(len(item["exemplars"]) for item in exemplars)
    print(f"{len(rules)} rules, {len(unhealthy)} unhealthy; {stored} exemplars of TTFT stored")
    for line in (*empty, *unhealthy):
        print(f"NO DATA  {line}")
    return int(bool(empty or unhealthy or not exemplars))


async def answer_of(http: aiohttp.ClientSession, url: str, **params: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = (await data(http, url, **params))["result"]
    return result


async def data(http: aiohttp.ClientSession, url: str, **params: str) -> Any:
    async with http.get(url, params=params) as answer:
        reply = await answer.json()
        assert reply["status"] == "success", (params, reply)
        return reply["data"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Check every query of dashboards and rules with Prometheus."
    )
    parser.add_argument("--prometheus", default="prometheus", help="path of Prometheus")
    sys.exit(asyncio.run(main(parser.parse_args().prometheus)))
