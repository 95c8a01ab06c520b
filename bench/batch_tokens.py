"""Counts which tokens of a batch job the engines generated more than once, and why.

The mock engines' generation log says how many tokens each attempt at a request generated. If an
attempt continues an answer, its prompt ends in the tokens that the gateway had kept. Two kinds of
tokens are generated again:

- tokens that were never kept: they were on their way to the gateway when the attempt was stopped,
  or the gateway was killed before it kept them
- kept tokens: an attempt did not continue after the last kept token. This must not happen
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import aiohttp
import msgspec

from mockgpu.generation_log import GeneratedSequence
from mockgpu.mock_tokenizer import token_ids
from tests.metrics_page import total

GENERATION_LOG = "generated.jsonl"


class Attempt(NamedTuple):
    """One try of an engine to answer a request of a batch job, as the engine logged it.

    A request that is stopped is tried again later, and continues its answer.

    start      number of the answer's tokens that its prompt already contained
    generated  number of tokens that it generated
    began_s    monotonic time of its beginning, in seconds
    ended_s    monotonic time of its end
    """

    start: int
    generated: int
    began_s: float
    ended_s: float


class Regenerated(NamedTuple):
    """The tokens of a batch job that the engines generated in vain, by reason.

    in_flight   number of stops, by the number of tokens that a stop lost before they were kept
    killed      number of tokens lost because the gateway was killed before it kept them
    kept_again  number of tokens that the gateway had kept, and that were still generated again
    """

    in_flight: Counter[int]
    killed: int
    kept_again: int

    @property
    def in_flight_tokens(self) -> int:
        return sum(tokens * stops for tokens, stops in self.in_flight.items())

    @property
    def total(self) -> int:
        return self.in_flight_tokens + self.killed + self.kept_again


class JournalWatch:
    """Reads the file in which the gateway keeps the progress of a batch job (its journal).

    The file stays open here, so that it can be read after the gateway has deleted it. There must be
    only one batch job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def open_if_created(self) -> None:
        """Open the batch job's journal (progress file) if the gateway has created it.

        Call this whenever the batch job is polled. A separate timer would let virtual time pass
        while threads of the gateway write files, and leave the batch job less time.
        """
        if self._file is None:
            for path in self._folder.glob("batches/*/*/journal"):
                self._file = path.open("rb")

    def kept(self) -> dict[int, list[int]]:
        """Return, for each request, the number of tokens that were kept at each of its stops."""
        kept: dict[int, list[int]] = defaultdict(list)
        if self._file is not None:
            with self._file:
                for line in map(json.loads, self._file):
                    if line.get("kept"):
                        kept[line["number"]].append(len(line["kept"]["tokens"]))
        return kept


def long_stops(kept: Mapping[int, Sequence[int]], least: int) -> int:
    """Count the stops of answers with `least` or more tokens that have grown since the last stop.

    kept  for each request, the number of tokens kept at each of its stops
    """
    return sum(
        now >= least and now > before
        for lengths in kept.values()
        for before, now in zip([0, *lengths], lengths, strict=False)
    )


class Attempts:
    """The engines' attempts at the requests of a batch job, from their log of generated tokens.

    of         the attempts at each request, by its number
    generated  total number of tokens in the log
    others     number of tokens that belong to no request of the batch job
    """

    def __init__(self, log: Iterable[bytes], prompts: Sequence[bytes]) -> None:
        """Read the engines' log of generated tokens, and sort its lines by request.

        log      the lines; those whose prompt begins with none of `prompts` belong to other
                 requests
        prompts  the prompt of each request, four bytes per token; no prompt begins with another one
        """
        known = {tuple(token_ids(prompt)): index for index, prompt in enumerate(prompts)}
        lengths = sorted({len(prompt) for prompt in known})
        self.of: dict[int, list[Attempt]] = defaultdict(list)
        self.generated = 0
        self.others = 0
        for line in map(msgspec.json.Decoder(GeneratedSequence).decode, log):
            self.generated += line.generated
            prompt = tuple(line.prompt)
            index = next((known[p] for n in lengths if (p := prompt[:n]) in known), None)
            if index is None:
                self.others += line.generated
                continue
            start = len(prompt) - len(prompts[index]) // 4
            self.of[index].append(Attempt(start, line.generated, line.began_s, line.ended_s))
        for attempts in self.of.values():
            attempts.sort(key=lambda attempt: attempt.began_s)


def count_regenerated(
    attempts: Mapping[int, Sequence[Attempt]],
    kept: Mapping[int, Sequence[int]],
    final: Mapping[int, int],
    kills: Sequence[float],
) -> Regenerated:
    """Count which tokens of a batch job's requests were generated more than once.

    attempts  the engines' attempts at each request, in order
    kept      for each request, the number of tokens kept at each of its stops
    final     number of tokens of each answer
    kills     monotonic times at which the gateway was killed, in seconds
    """
    in_flight: Counter[int] = Counter()
    killed = kept_again = 0
    for number, own in attempts.items():
        ends = [*(attempt.start for attempt in own[1:]), final.get(number, 0)]
        # A kill also loses a whole answer that is not in the journal yet.
        untils = [*(attempt.began_s for attempt in own[1:]), own[-1].ended_s]
        # What was kept and never continued is lost: an attempt that followed began before it.
        lost_ends = set(kept.get(number, ())).difference(ends)
        begun = 0
        for attempt, end, until in zip(own, ends, untils, strict=True):
            reached = attempt.start + attempt.generated
            begun = max(begun, attempt.start)
            kept_again += max(0, min(begun, reached) - attempt.start)
            counted = max(end, attempt.start)
            lost = max((at - counted for at in lost_ends if counted < at <= reached), default=0)
            kept_again += lost
            wasted = attempt.generated - max(0, min(end, reached) - attempt.start) - lost
            if any(attempt.began_s < kill < until for kill in kills):
                killed += wasted
            elif attempt is not own[-1] or wasted:
                in_flight[wasted] += 1
    return Regenerated(in_flight, killed, kept_again)


async def generated_tokens(http: aiohttp.ClientSession, urls: list[str]) -> float:
    """Wait until the engines run no request; return how many tokens they have generated."""
    made = 0.0
    for url in urls:
        running = 1.0
        while running:
            await asyncio.sleep(0.05)
            async with http.get(f"{url}/metrics") as answer:
                page = await answer.text()
            running = total(page, "vllm:num_requests_running")
            running += total(page, "vllm:num_requests_waiting")
        made += total(page, "vllm:generation_tokens_total")
    return made


def read_log(work: Path) -> list[bytes]:
    """Return the lines of the engines' generation log in the folder `work`."""
    return (work / GENERATION_LOG).read_bytes().splitlines()
