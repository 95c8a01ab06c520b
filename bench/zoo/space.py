"""The workloads on which policies are compared, and random sampling from them.

A workload has a value on each of several axes, such as the model or the kind of arrivals. Each
value has a weight. Sampling is stratified: among 20 consecutive workloads, the values of the main
axes nearly have the shares that their weights give.

A workload consists only of numbers. fleets.py builds its engines, requests.py its requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from random import Random

import msgspec

BLOCK = 20
"""Number of consecutive workloads that together have nearly the shares in WEIGHTS."""

WEIGHTS: Mapping[str, Mapping[str, float]] = {
    # gamma: a coefficient of variation from 2 to 13; spikes: moments with 3 to 6 times the rate
    "arrivals": {"poisson": 45, "gamma": 30, "diurnal": 12, "spikes": 13},
    # short: 5 to 80 tokens; chat: 100 to 600; tail: 80 % short and 20 % long; reasoning: a mean
    # from 1,500 to 4,000, at most 6,000
    "answers": {"short": 20, "chat": 40, "tail": 10, "reasoning": 30},
    # Skewed prefixes are tree (nested prefixes by Zipf's law) and documents (one of a collection)
    "sharing": {"none": 25, "system": 20, "tree": 20, "documents": 15, "sessions": 20},
    # unequal: two kinds of GPU; labels: the gateway believes a wrong GPU or chunk size; slow: some
    # members take 1.5 to 4 times as long, unknown to the gateway
    "condition": {"equal": 60, "unequal": 14, "labels": 13, "slow": 13},
    # pairs: any two groups may share a request; pools: separate prefill and decode groups
    "split": {"none": 85, "pairs": 8, "pools": 7},
    "groups": {"2": 12, "4": 28, "8": 34, "16": 16, "32": 7, "64": 3},
    "model": {"llama-3.1-70b-fp8": 40, "qwen3-32b": 30, "llama-3.1-8b": 30},
    "chunk": {"2048": 20, "8192": 60, "16384": 20},
    "ttft_s": {"1": 15, "2": 20, "5": 35, "10": 20, "30": 10},
    "tpot_s": {"0.03": 15, "0.05": 30, "0.1": 40, "0.15": 15},
}
STRATIFIED = ("arrivals", "answers", "sharing", "condition", "split", "groups")

DROP_RULES = (
    "no rule reaches 90 % attainment at any load down to 1/30 of the estimated capacity",
    "all rules reach 90 % attainment even at 30 times the estimated capacity",
    "one replay at the estimated capacity takes more than 60 s of CPU time",
)
"""The only reasons for which a drawn workload is left out; the report lists them."""

MOST_REQUESTS = 3_000
FEWEST_REQUESTS = 600
PER_GROUP = 90
PER_GROUP_SESSIONS = 225
PER_GROUP_LONG = 450
"""Number of requests per engine if answers are long: several times its concurrent requests."""

MOST_GROUPS_LONG = 4
"""Maximum number of engines that MOST_REQUESTS requests can fill with long answers or sessions."""

MOST_GROUPS_SESSIONS = 8
SPANS = 6.0
"""Minimum duration of arrivals in TTFT budgets, so that queues lead to missed budgets."""


class Workload(msgspec.Struct, frozen=True):
    """One random workload: its requests and its engines. Lengths are in tokens, times in seconds.

    number          its number in the sequence of workloads
    seed            random seed of the sequence
    requests        number of requests in one simulation
    spread          coefficient of variation of the gaps, or height of the wave or spikes
    prompt_median   median length of the part of a prompt that is not shared
    prompt_sigma    sigma of that log-normal length
    answer_tokens   mean length of answers
    answer_sigma    spread of that length
    shared_tokens   length of the shared part: system prompt, tree node or document
    shared_count    number of system prompts, roots or documents; turns of a session
    skew            exponent of Zipf's law, by which shared parts are chosen
    think_s         median pause in a session
    condition_draw  random number from 0 to 1 that chooses details of a special condition
    prefill_share   share of prefill engines in separate pools
    link_gb_s       speed of each engine's network link in GB/s
    """

    number: int
    seed: str
    arrivals: str
    answers: str
    sharing: str
    condition: str
    split: str
    groups: int
    model: str
    chunk_tokens: int
    ttft_s: float
    tpot_s: float
    requests: int
    spread: float
    prompt_median: float
    prompt_sigma: float
    answer_tokens: float
    answer_sigma: float
    shared_tokens: int
    shared_count: int
    skew: float
    think_s: float
    condition_draw: float
    prefill_share: float
    link_gb_s: float

    @property
    def name(self) -> str:
        return f"{self.seed[:8]}-{self.number}"

    @property
    def is_long(self) -> bool:
        """Return whether the workload's mean answer has at least 1,500 tokens."""
        return self.answers == "reasoning"


def draw(seed: str, number: int) -> Workload:
    rng = Random(f"zoo {seed} {number}")
    chosen = {
        axis: _choose(
            WEIGHTS[axis],
            _stratum(seed, number, axis) if axis in STRATIFIED else rng.random(),
        )
        for axis in WEIGHTS
    }
    groups = _groups(chosen)
    return Workload(
        number=number,
        seed=seed,
        arrivals=chosen["arrivals"],
        answers=chosen["answers"],
        sharing=chosen["sharing"],
        condition=chosen["condition"],
        split=chosen["split"],
        groups=groups,
        model=chosen["model"],
        chunk_tokens=int(chosen["chunk"]),
        ttft_s=float(chosen["ttft_s"]),
        tpot_s=float(chosen["tpot_s"]),
        requests=_requests(chosen, groups),
        spread=_spread(chosen["arrivals"], rng),
        prompt_median=_log_uniform(rng, 60, 12_000),
        prompt_sigma=rng.uniform(0.2, 1.3),
        answer_tokens=_answer_tokens(chosen["answers"], rng),
        answer_sigma=rng.uniform(0.2, 0.9),
        shared_tokens=round(_log_uniform(rng, 600, 8_000)),
        shared_count=_shared_count(chosen["sharing"], groups, rng),
        skew=rng.uniform(0.7, 1.5),
        think_s=_log_uniform(rng, 1.0, 60.0),
        condition_draw=rng.random(),
        prefill_share=rng.uniform(0.3, 0.7),
        link_gb_s=_log_uniform(rng, 0.125, 50.0),
    )


def _groups(chosen: Mapping[str, str]) -> int:
    groups = int(chosen["groups"])
    if chosen["answers"] == "reasoning":
        groups = min(groups, MOST_GROUPS_LONG)
    if chosen["sharing"] == "sessions":
        groups = min(groups, MOST_GROUPS_SESSIONS)
    if chosen["split"] != "none":
        groups = max(groups, 4)
    return groups


def _requests(chosen: Mapping[str, str], groups: int) -> int:
    if chosen["answers"] == "reasoning":
        per_group = PER_GROUP_LONG
    elif chosen["sharing"] == "sessions":
        per_group = PER_GROUP_SESSIONS
    else:
        per_group = PER_GROUP
    return min(MOST_REQUESTS, max(FEWEST_REQUESTS, groups * per_group))


def _stratum(seed: str, number: int, axis: str) -> float:
    # Return a random number from 0 to 1; the numbers of a block cover that range evenly.
    block, place = divmod(number, BLOCK)
    rng = Random(f"zoo {seed} {block} {axis}")
    order = list(range(BLOCK))
    rng.shuffle(order)
    offset = rng.random()
    return ((order[place] + offset) / BLOCK) % 1.0


def _choose(weights: Mapping[str, float], place: float) -> str:
    names: Sequence[str] = tuple(weights)
    left = place * sum(weights.values())
    for name in names:
        left -= weights[name]
        if left < 0:
            return name
    return names[-1]


def _log_uniform(rng: Random, low: float, high: float) -> float:
    return exp(rng.uniform(log(low), log(high)))


def _spread(arrivals: str, rng: Random) -> float:
    if arrivals == "gamma":
        return _log_uniform(rng, 2.0, 13.0)
    return rng.uniform(3.0, 6.0) if arrivals == "spikes" else rng.uniform(0.3, 0.9)


def _answer_tokens(answers: str, rng: Random) -> float:
    low, high = {
        "short": (5, 80),
        "chat": (100, 600),
        "tail": (300, 1_500),
        "reasoning": (1_500, 4_000),
    }[answers]
    return _log_uniform(rng, low, high)


def _shared_count(sharing: str, groups: int, rng: Random) -> int:
    if sharing == "system":
        return rng.randint(1, 8)
    if sharing == "sessions":
        return round(_log_uniform(rng, 3, 16))
    return round(_log_uniform(rng, 4, 60) * groups ** (0.5 if sharing == "tree" else 1.0))
