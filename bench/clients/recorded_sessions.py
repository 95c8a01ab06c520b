"""`make recorded-sessions`: measures how much of long sessions of the recorded clients is cached.

    python -m bench.clients.recorded_sessions --policies prefix_aware priced [--only codex ...]

The sessions continue the conversations in tests/data/clients. Each turn after the recorded ones has
the form in which the client sends an answer and a question. It contains the answer that the gateway
gave. Sessions differ in their ids and from their first question on.

Gateway, four mock engines and clients run in one process on virtual time, so the results do not
depend on how busy the machine is. The share is that of bench/clients/run.py: cached prompt tokens,
divided by those that one cache without a size limit would have had.
"""

from __future__ import annotations

import time

from bench.virtual_loop import VirtualLoop, wait_for_thread

CLOCK = VirtualLoop()
time.monotonic, time.time = CLOCK.time, CLOCK.wall_time  # before other modules import them

import argparse  # noqa: E402
import asyncio  # noqa: E402
import copy  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import aiohttp  # noqa: E402

from bench.clients.cache_share import endless_hits  # noqa: E402
from bench.clients.recorder import Exchange, Message  # noqa: E402
from gateway.app import App  # noqa: E402
from gateway.config.loader import load_config  # noqa: E402
from mockgpu.fleet import run_fleet  # noqa: E402
from mockgpu.tp_group import GroupSpec  # noqa: E402
from policies.sizing.gpus import gpu_named  # noqa: E402
from policies.sizing.model_shapes import model_named  # noqa: E402
from tests import recorded_clients  # noqa: E402
from tests.metrics_page import total  # noqa: E402
from tests.recorded_clients import RecordedClient  # noqa: E402

ENGINES = 4
WANTED_SHARE = 0.95
CONFIG = """
version: 1
listeners: {{api: {{port: 0}}, admin: {{port: 0}}}}
observability: {{access_log: '{log}'}}
models: [{{name: demo-8b, pool: chat, aliases: ['claude-*', 'gpt-*']}}]
pools: {{chat: {{policy: {policy}, admission: priced, endpoints: [{endpoints}]}}}}
"""
_SITE = re.compile(r"about site (\d+)")
_PREVIOUS = re.compile(r'("previous_response_id":\s?")[^"]+')
_RESPONSE_ID = re.compile(rb'"id":\s?"(resp_[^"]+)"')


class Turn(NamedTuple):
    """One recorded request of a client program: its path with query, its headers and its body."""

    target: str
    headers: dict[str, str]
    body: str


class Result(NamedTuple):
    """How many prompt tokens of one client program's sessions were cached.

    `endless` is their number with a cache without a size limit.
    """

    turns: int
    cached: float
    endless: int

    @property
    def share(self) -> float:
        return self.cached / self.endless


class Session:
    """A recorded conversation of a client program, which is sent again to another gateway.

    The answers that the gateway gives now replace the recorded ones in later requests.
    """

    def __init__(self, client: RecordedClient, number: int) -> None:
        self._turns = [each for each in client.requests if each.json.get("tools")]
        headers = {name.lower(): value for name, value in self._turns[-1].headers.items()}
        self._id = headers.get(client.session, "")
        self._number = number
        self._texts: list[str] = []

    def turns(self, count: int) -> Iterator[tuple[Turn, Answer]]:
        """Yield `count` requests of the session, each with an Answer that the caller must fill.

        Each request contains the answers to the requests before it.
        """
        body: Any = None
        previous = ""
        for number in range(count):
            if number < len(self._turns):
                recorded = self._turns[number]
                body = json.loads(self._own(recorded.body))
            else:
                body = self._continued(body, number, self._texts[-1])
            text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
            text = _PREVIOUS.sub(lambda match, known=previous: match[1] + known, text)  # type: ignore[misc]
            answer = Answer()
            yield Turn(recorded.target, self._own_headers(recorded.headers), text), answer
            self._texts.append(answer.text)
            previous = answer.response_id

    def _own(self, text: str) -> str:
        # Return a recorded text with the ids and the site of this session.
        if self._id:
            text = text.replace(self._id, f"{self._id[:-2]}{self._number:02d}")
        return _SITE.sub(lambda match: f"about site {match[1]}{self._number}", text)

    def _own_headers(self, headers: dict[str, str]) -> dict[str, str]:
        return {name: self._own(value) for name, value in headers.items()}

    def _continued(self, body: Any, number: int, answer: str) -> Any:
        # Return the request that follows `body` after `answer`, in the client's own forms.
        body = copy.deepcopy(body)
        name = "messages" if "messages" in body else "input"
        items = body[name]
        question = f"This is message {number} about site {self._number}. How deep is the water now?"
        last = _with_text(items[-1], question)
        if "previous_response_id" in body:
            return body | {name: [last]}
        forms = [item for item in items[:-1] if _asks(item)]
        asked = _with_text(forms[-1], _text_of(items[-1]))
        said = _with_text(items[-2], answer)
        body[name] = [*items[:-1], asked, said, last]
        return body


class Answer:
    """The answer of the gateway to one request, once it has arrived completely."""

    def __init__(self) -> None:
        self.text = self.response_id = ""
        self.raw = b""

    def read(self, raw: bytes, path: str) -> None:
        self.raw = raw
        found = _RESPONSE_ID.search(raw)
        self.response_id = found[1].decode() if found else ""
        self.text = "".join(_texts_of(raw, path))


def _asks(item: Any) -> bool:
    return item.get("role") == "user" and "This is message" in json.dumps(item)


def _text_of(item: Any) -> str:
    content = item["content"]
    return content if isinstance(content, str) else content[0]["text"]


def _with_text(item: Any, text: str) -> Any:
    content = item["content"]
    if isinstance(content, str):
        return item | {"content": text}
    return item | {"content": [content[0] | {"text": text}, *content[1:]]}


def _texts_of(raw: bytes, path: str) -> Iterator[str]:
    # Yield the texts of an answer, whole or streamed, of any API.
    if raw.startswith(b"{"):
        whole = json.loads(raw)
        if path == "/v1/chat/completions":
            yield whole["choices"][0]["message"]["content"] or ""
        return
    for line in raw.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if path == "/v1/chat/completions":
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
        elif event["type"] == "content_block_delta":
            yield event["delta"].get("text", "")
        elif event["type"] == "response.output_text.delta":
            yield event["delta"]


async def converse(
    http: aiohttp.ClientSession, url: str, session: Session, turns: int, sent: list[Exchange]
) -> None:
    for turn, answer in session.turns(turns):
        started = CLOCK.time()
        headers = turn.headers | {"accept-encoding": "identity"}
        data = turn.body.encode()
        async with http.post(url + turn.target, data=data, headers=headers) as response:
            raw = await response.read()
            assert response.status == 200, raw
        answer.read(raw, turn.target.partition("?")[0])
        request = Message(f"POST {turn.target} HTTP/1.1", [], data)
        whole = Message("HTTP/1.1 200 OK", [], raw)
        sent.append(Exchange(request, whole, started))


async def measure(client: RecordedClient, policy: str, sessions: int, turns: int) -> Result:
    """Replay one client's sessions on a new gateway and new engines; return what was cached."""
    spec = GroupSpec(
        "demo-8b",
        model_named("demo-8b"),
        gpu_named("h100"),
        tp=4,
        stores_responses=True,
        may_end_from=1024,
    )
    async with run_fleet([spec] * ENGINES) as members:
        urls = [member.url for member in members]
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "gateway.yaml"
            endpoints = ", ".join(f"{{url: '{url}', max_concurrency: 128}}" for url in urls)
            log = Path(folder) / "access.log"
            config.write_text(CONFIG.format(policy=policy, endpoints=endpoints, log=log))
            app = App(load_config(config, {}))
            await app.start()
            try:
                sent, counted = await _measure(app.url, urls, client, sessions, turns)
                # A thread writes the access log.
                await wait_for_thread(lambda: log.read_bytes().count(b"\n") >= len(sent))
            finally:
                await app.stop()
            logged = [json.loads(line).get("cached_tokens") for line in log.open()]
            assert len(logged) == len(sent), f"{len(logged)} of {len(sent)} requests are logged"
            # The engines also count hedged requests, but streams of some clients have no counts.
            cached = counted if None in logged else sum(logged)
            return Result(len(sent), cached, endless_hits(sent))


async def _measure(
    url: str, engines: list[str], client: RecordedClient, sessions: int, turns: int
) -> tuple[list[Exchange], float]:
    # Return the requests with their answers in order, and the cached tokens that engines counted.
    sent: list[Exchange] = []
    async with aiohttp.ClientSession() as http:
        users = [Session(client, number) for number in range(sessions)]
        await asyncio.gather(*(converse(http, url, user, turns, sent) for user in users))
        cached = 0.0
        for engine in engines:
            async with http.get(f"{engine}/metrics") as page:
                cached += total(await page.text(), "vllm:prefix_cache_hits_total")
    sent.sort(key=lambda exchange: exchange.started)
    return sent, cached


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=["prefix_aware", "priced"])
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="replay only the recordings whose names contain one of these texts",
    )
    parser.add_argument("--sessions", type=int, default=4, help="number of concurrent sessions")
    parser.add_argument(
        "--turns", type=int, default=20, help="number of requests that each session sends"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    return parser.parse_args()


def measured(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Replay the recording of the client `name` with each policy, and return the cached shares."""
    client = recorded_clients.load(name)
    return {
        policy: CLOCK.run_until_complete(
            measure(client, policy, options.sessions, options.turns)
        ).share
        for policy in options.policies
    }


def measured_alone(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Call measured() in a new process, so that measurements do not slow each other."""
    command = [sys.executable, "-m", "bench.clients.recorded_sessions", "--json", "--only", name]
    command += ["--sessions", str(options.sessions), "--turns", str(options.turns)]
    command += ["--policies", *options.policies]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    shares: dict[str, float] = json.loads(result.stdout)[name]
    return shares


def main() -> int:
    options = parse()
    asyncio.set_event_loop(CLOCK)
    names = [
        name
        for name in recorded_clients.names()
        if not options.only or any(part in name for part in options.only)
    ]
    shares: dict[str, dict[str, float]] = {}
    if not options.json:
        print(f"| recording | {' | '.join(options.policies)} |")
        print("|---" * (1 + len(options.policies)) + "|")
    for name in names:
        find = measured if options.json else measured_alone
        shares[name] = find(name, options)
        if not options.json:
            cells = " | ".join(f"{share:.3f}" for share in shares[name].values())
            print(f"| {name} | {cells} |", flush=True)
    if options.json:
        print(json.dumps(shares))
    least = min(share for found in shares.values() for share in found.values())
    return 0 if least >= WANTED_SHARE else 1


if __name__ == "__main__":
    raise SystemExit(main())
