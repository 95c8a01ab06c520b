"""The settings of a replay as values: service classes, clients' behaviour, faults, cache view.

Fleet, traffic and policy are not options.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from policies.routing_types import STANDARD, Slo


class CacheView(StrEnum):
    """Where the simulated gateway gets its information about cached prompts.

    The source is either its own prefix index, as in a real gateway, or the true state of engines.
    """

    INDEX = "index"
    EXACT = "exact"


class ClientBehaviour(msgspec.Struct, frozen=True):
    """How simulated clients behave if their requests are refused or wait for a long time.

    retries            how often a client retries after status 429 (OpenAI's SDKs: 2)
    obeys_retry_after  whether the client waits for the Retry-After time. Otherwise, and if there is
                       no such header, it waits 0.5 s, doubled at each retry up to 8 s, minus a
                       random part of up to a quarter, like OpenAI's SDKs
    patience_s         seconds for which the client waits for the first token; it sends this time as
                       the request's deadline
    """

    retries: int = 0
    obeys_retry_after: bool = True
    patience_s: float | None = None


class GroupFaultKind(StrEnum):
    """A kind of fault or maintenance of a simulated group."""

    # A rank fails: all jobs fail at once. The group returns after `duration_s` with empty caches.
    LOSE = "lose"
    SLOW = "slow"  # all steps take `factor` times as long for `duration_s`
    # An operator drains it for `duration_s`: it finishes its jobs and keeps its cache.
    DRAIN = "drain"


class GroupFault(msgspec.Struct, frozen=True):
    """A fault of one simulated group.

    start_s     when it begins, in seconds of the replay
    group       index of the group in the fleet; all data-parallel ranks of an engine count as one
    kind        kind of fault
    duration_s  how long it lasts, in seconds; None: forever
    factor      how many times as long the steps of a slow group take
    only        which steps are slow: "prefill" (with prompt tokens), "decode" (without), or ""
                (both)
    """

    start_s: float
    group: int
    kind: GroupFaultKind = GroupFaultKind.LOSE
    duration_s: float | None = None
    factor: float = 2.0
    only: str = ""


class ReplayOptions(msgspec.Struct, frozen=True):
    """The options of a replay of recorded traffic.

    expected_output  output tokens that the gateway expects of each request; None: as many as
                     max_tokens, which clients then use completely
    learns_lengths   whether the gateway learns expected lengths from completed answers, like a live
                     gateway. It starts with DEFAULT_OUTPUT_TOKENS and ignores `expected_output`
    scrape_s         seconds between two scrapes of the engines' metrics; None: no scrapes
    scrape_age_s     age of the metrics in seconds when they reach the gateway
    lost_events      share of the prefix index updates that are lost, from 0 to 1
    horizon_s        time after which closed-loop clients send nothing, and at which unfinished
                     requests are cut; None: the replay ends with the last token
    merges_steps     whether to simulate consecutive decode steps at once; False is slower, and is
                     used for comparison
    slow_start_s     seconds in which a new group gets fewer concurrent requests while other groups
                     have capacity
    slow_factor      a group is ejected if its latency is this multiple of its peers'; 0: never
    hedge_share      maximum share of requests that get a second attempt (hedge); 0: none. It needs
                     a `slow_factor`
    always_predicts  whether the gateway learns its endpoints' speed and predicts latencies even if
                     neither policy nor admission reads that; a live gateway does not
    index_tokens     tokens per block of the gateway's prefix index; None: those of the fleet's KV
                     blocks
    classes          service classes by name; STANDARD is used for requests without a known class
    """

    seed: int = 0
    view: CacheView = CacheView.INDEX
    expected_output: int | None = 350
    learns_lengths: bool = False
    scrape_s: float | None = 1.0
    scrape_age_s: float = 0.0
    lost_events: float = 0.0
    horizon_s: float | None = None
    merges_steps: bool = True
    standard: Slo = STANDARD
    classes: Mapping[str, Slo] = MappingProxyType({})
    clients: ClientBehaviour = ClientBehaviour()
    faults: tuple[GroupFault, ...] = ()
    slow_start_s: float = 0.0
    slow_factor: float = 0.0
    hedge_share: float = 0.0
    always_predicts: bool = True
    index_tokens: int | None = None
