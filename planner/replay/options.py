"""The options of a replay other than fleet, traffic and policy: classes, clients, faults and
metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from policies.model import STANDARD, Slo


class CacheView(StrEnum):
    """How the simulated gateway knows prefix caches: from its own index, or from the engines' true
    state.
    """

    INDEX = "index"
    EXACT = "exact"


class ClientBehaviour(msgspec.Struct, frozen=True):
    """What simulated clients do when they are refused or wait for long.

    retries     how often a client retries after a 429 (OpenAI's SDKs: 2)
    obey        whether it waits for Retry-After. Otherwise, and without that header, it waits 0.5
                s, doubled each time up to 8 s, minus up to a quarter at random, like those SDKs
    patience_s  seconds it waits for its first token before it gives up; sent in advance as the
                deadline
    """

    retries: int = 0
    obey: bool = True
    patience_s: float | None = None


class GroupFaultKind(StrEnum):
    """A kind of fault or maintenance of a simulated group."""

    # a rank fails: all jobs fail at once, and the group is back, empty, after `for_s`
    LOSE = "lose"
    SLOW = "slow"  # all steps take `factor` times as long for `for_s`
    DRAIN = "drain"  # an operator drains it for `for_s`: it finishes its jobs and keeps its cache


class GroupFault(msgspec.Struct, frozen=True):
    """A fault of one simulated group.

    at_s     when it begins, in seconds of the replay
    group    index of the group; all data-parallel ranks of an engine are one
    trouble  kind of fault
    for_s    how long it lasts; None: for ever
    factor   factor on the times of slow steps
    only     which steps are slow: prefill (with prompt tokens), decode (without), or empty for both
    """

    at_s: float
    group: int
    trouble: GroupFaultKind = GroupFaultKind.LOSE
    for_s: float | None = None
    factor: float = 2.0
    only: str = ""


class ReplayOptions(msgspec.Struct, frozen=True):
    """The options of a replay of recorded traffic.

    expected_output  output tokens the gateway expects of a request; None: clients send max_tokens
                     and use all of it
    learns_lengths   whether it learns expected lengths from ended answers, as the live gateway
                     does, which begins with DEFAULT_OUTPUT_TOKENS; `expected_output` is ignored
                     then
    scrape_s         seconds between scrapes of metrics; None: no scrapes
    scrape_age_s     age of the metrics on arrival
    lost_events      share of index updates that are lost, 0 to 1
    horizon_s        closed loops send nothing after it, and unfinished requests are cut; None: run
                     to the last token
    leaping          False: simulate every decode step separately, for comparison
    slow_start_s     seconds that a new group gets fewer concurrent requests while others have
                     capacity
    slow_factor      ratio to its peers at which a group is ejected as slow; 0: never
    hedge_share      maximum of hedges as a share of all requests; 0: none. Only while slow groups
                     are looked for
    classes          service classes by name; a request without a known one is STANDARD
    """

    seed: int = 0
    view: CacheView = CacheView.INDEX
    expected_output: int | None = 350
    learns_lengths: bool = False
    scrape_s: float | None = 1.0
    scrape_age_s: float = 0.0
    lost_events: float = 0.0
    horizon_s: float | None = None
    leaping: bool = True
    standard: Slo = STANDARD
    classes: Mapping[str, Slo] = MappingProxyType({})
    clients: ClientBehaviour = ClientBehaviour()
    faults: tuple[GroupFault, ...] = ()
    slow_start_s: float = 0.0
    slow_factor: float = 0.0
    hedge_share: float = 0.0
