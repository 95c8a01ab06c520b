"""`make images`: measures how much requests with large images slow text requests at the gateway.

    python -m bench.images --rounds 5 --seconds 25

Text requests are sent at random times through a gateway to four mock engines. Three kinds of rounds
alternate:

text only       no other requests are sent
beside text     a second process sends long text requests, with as many tokens as an image has
beside images   the second process sends images of 3 MB at these times, instead of long texts

Each image is followed by a second question about it. The mock engines count 900 tokens per image.

It prints the time to first token of text requests and, on an idle gateway, of image requests. It
also prints how many second questions found the image cached. Some do not, because the routing
policy sends them to another engine to balance the load.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp

from bench.confidence_intervals import median_interval
from mockgpu.media import MEDIUM_TOKENS
from tests.e2e.processes import ENV, gateway_process, run_process

MODEL = "demo-8b"
ENGINES = 4
KINDS = ("text only", "beside text", "beside images")
IMAGE_BYTES = 3_000_000
WORDS = [f"word{number:04d}" for number in range(2000)]
BYTES_PER_TOKEN = 4  # bytes of text per token in the mock engines
TEXT_TOKENS, ANSWER_TOKENS = 2000, 16
SECOND_AFTER_S = 0.5  # time between the first answer about an image and the second question
MOST_RATIO = 1.05  # maximum p99 TTFT of text requests beside images, divided by that without images
LEAST_CACHED = MEDIUM_TOKENS - 50
CONFIG = """
models: [{{name: demo-8b, pool: main}}]
pools: {{main: {{policy: prefix_aware, endpoints: [{endpoints}]}}}}
"""


class Answer(NamedTuple):
    """One measured answer: its seconds to the first token, and its cached prompt tokens."""

    ttft_s: float
    cached: int


class Others(NamedTuple):
    """What the second client measured: answers to both questions about each image or long text."""

    first: list[Answer]
    second: list[Answer]


def text_of(tokens: int, seed: str) -> str:
    rng = random.Random(seed)
    words = rng.choices(WORDS, k=tokens * BYTES_PER_TOKEN // 9 + 1)
    return " ".join(words)[: tokens * BYTES_PER_TOKEN]


def body(content: list[dict[str, Any]]) -> bytes:
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request).encode()


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(seed: str) -> dict[str, Any]:
    image = base64.b64encode(random.Random(seed).randbytes(IMAGE_BYTES)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}}


async def ask(http: aiohttp.ClientSession, url: str, data: bytes) -> Answer:
    """Send a chat request and read its stream. Raises AssertionError if it is refused."""
    sent, first, usage = time.monotonic(), 0.0, {}
    headers = {"content-type": "application/json"}
    async with http.post(f"{url}/v1/chat/completions", data=data, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not first and b'"content":"' in line and b'"content":""' not in line:
                first = time.monotonic()
            if b'"usage":{' in line:
                usage = json.loads(line.removeprefix(b"data: "))["usage"]
    assert first
    assert usage
    return Answer(first - sent, (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def times_of(rate: float, seconds: float, seed: str) -> list[float]:
    rng, times, now = random.Random(seed), [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        times.append(now)
    return times


async def send_texts(url: str, options: argparse.Namespace, kind: str, seed: str) -> list[float]:
    """Send text requests for one round, and return their times to first token in seconds."""
    times = times_of(options.rate, options.seconds, seed)
    bodies = [body([text_part(text_of(TEXT_TOKENS, f"{kind} {seed} {at}"))]) for at in times]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        began, tasks = time.monotonic(), []
        for at, data in zip(times, bodies, strict=True):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            tasks.append(asyncio.create_task(ask(http, url, data)))
        return [answer.ttft_s for answer in await asyncio.gather(*tasks)]


async def send_others(url: str, options: argparse.Namespace, kind: str, seed: str) -> Others:
    """Send pairs of questions about an image, or about an equally long text, for one round.

    This is the second process. It prints a line when all bodies are prepared, and starts when it
    reads a line from stdin.
    """
    times = times_of(options.images, options.seconds - SECOND_AFTER_S, f"others {seed}")
    pairs = []
    for number in range(len(times)):
        name = f"{kind} {seed} {number}"
        part = (
            image_part(name) if kind == "beside images" else text_part(text_of(MEDIUM_TOKENS, name))
        )
        pairs.append([body([part, text_part(text)]) for text in ("What is it?", "And where?")])
    print("made", flush=True)
    sys.stdin.readline()
    others, began = Others([], []), time.monotonic()

    async def converse(first: bytes, second: bytes) -> None:
        others.first.append(await ask(http, url, first))
        await asyncio.sleep(SECOND_AFTER_S)
        others.second.append(await ask(http, url, second))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        tasks = []
        for at, (first, second) in zip(times, pairs, strict=True):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            tasks.append(asyncio.create_task(converse(first, second)))
        await asyncio.gather(*tasks)
    return others


def run_round(
    url: str, options: argparse.Namespace, kind: str, seed: str
) -> tuple[list[float], Others]:
    """Send requests for one round, with or without requests of a second process beside them.

    url      URL of the gateway
    options  the options of the program
    kind     what the second process sends at the same time: nothing, long texts, or images
    seed     random seed of the requests

    Returns the times to first token of the text requests in seconds, and the second process's
    answers.
    """
    if kind == KINDS[0]:
        return asyncio.run(send_texts(url, options, kind, seed)), Others([], [])
    command = [sys.executable, "-m", "bench.images", "--send", url, kind, seed]
    command += ["--seconds", str(options.seconds), "--images", str(options.images)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=ENV, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write("start\n")
        process.stdin.flush()
        ttfts_s = asyncio.run(send_texts(url, options, kind, seed))
        first, second = json.loads(process.stdout.readline())
    return ttfts_s, Others([Answer(*each) for each in first], [Answer(*each) for each in second])


async def ask_alone(url: str, content: list[dict[str, Any]]) -> float:
    async with aiohttp.ClientSession() as http:
        return (await ask(http, url, body(content))).ttft_s


@contextmanager
def fleet() -> Iterator[list[str]]:
    """Run the mock engines during a `with` block, each in its own process, and yield their URLs."""
    command = [sys.executable, "-m", "mockgpu", "--port", "0", "--json"]
    with ExitStack() as stack:
        urls = []
        for _ in range(ENGINES):
            running = run_process(command, stdout=subprocess.PIPE, env=ENV)
            process = stack.enter_context(running)
            assert process.stdout
            urls.append(json.loads(process.stdout.readline())["ready"])
        yield urls


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


def report(ttfts_s: dict[str, list[list[float]]], others: dict[str, Others]) -> bool:
    """Print the results of all rounds of `make images`; return whether all limits were kept."""
    print("| round kind | requests | TTFT p50 | p99, median of rounds | p99, all rounds |")
    print("|---|---|---|---|---|")
    for kind, rounds in ttfts_s.items():
        merged = [ttft_s for each in rounds for ttft_s in each]
        p99_s = median(percentile(each, 0.99) for each in rounds)
        figures = (median(merged), p99_s, percentile(merged, 0.99))
        cells = " | ".join(f"{figure * 1000:.1f} ms" for figure in figures)
        print(f"| {kind} | {len(merged)} | {cells} |")
    is_good = True
    for base in KINDS[:2]:
        pairs = zip(ttfts_s[KINDS[2]], ttfts_s[base], strict=True)
        ratios = [percentile(with_, 0.99) / percentile(without, 0.99) for with_, without in pairs]
        low, middle, high = median_interval(ratios)
        print(f"p99 beside images / {base}: median {middle:.3f}, rounds {low:.3f} to {high:.3f}")
        is_good = is_good and middle <= MOST_RATIO
    for kind in KINDS[1:]:
        first = [answer.ttft_s for answer in others[kind].first]
        cached = [answer.cached for answer in others[kind].second]
        hits = sum(each >= LEAST_CACHED for each in cached)
        print(
            f"{kind}: TTFT of first questions p50 {median(first) * 1000:.0f} ms,"
            f" p99 {percentile(first, 0.99) * 1000:.0f} ms;"
            f" {hits} of {len(cached)} second questions found {LEAST_CACHED} tokens and more cached"
        )
    return is_good


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of measured rounds for each kind of prompt"
    )
    parser.add_argument("--seconds", type=float, default=25.0, help="length of a round in seconds")
    parser.add_argument("--rate", type=float, default=16.0, help="text requests sent per second")
    parser.add_argument("--images", type=float, default=1.0, help="images sent per second")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the first round")
    parser.add_argument(
        "--send",
        nargs=3,
        metavar=("URL", "KIND", "SEED"),
        help="run as the second process, which sends images (for internal use)",
    )
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.send:
        print(json.dumps(asyncio.run(send_others(options.send[0], options, *options.send[1:]))))
        return 0
    with fleet() as urls, tempfile.TemporaryDirectory() as folder:
        config = CONFIG.format(endpoints=", ".join(f"{{url: '{url}'}}" for url in urls))
        with gateway_process(Path(folder), config) as gateway:
            alone = [text_part(text_of(MEDIUM_TOKENS, "")), *map(image_part, "abc")]
            text_s, *images_s = [asyncio.run(ask_alone(gateway.url, [part])) for part in alone]
            found_ms = ", ".join(f"{image_s * 1000:.0f}" for image_s in images_s)
            print(f"idle gateway, TTFT: text {text_s * 1000:.0f} ms, images {found_ms} ms")
            ttfts_s: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
            others = {kind: Others([], []) for kind in KINDS}
            for number in range(options.rounds):
                order = KINDS if number % 2 == 0 else KINDS[::-1]
                for kind in order:
                    seed = str(options.seed + number)
                    found, sent = run_round(gateway.url, options, kind, seed)
                    ttfts_s[kind].append(found)
                    others[kind].first.extend(sent.first)
                    others[kind].second.extend(sent.second)
            return 0 if report(ttfts_s, others) else 1


if __name__ == "__main__":
    sys.exit(main())
