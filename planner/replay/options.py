"""What a replay may be told besides fleet, traffic and policy: classes, clients, faults, how stale the view is."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from policies.model import STANDARD, Slo


class View(StrEnum):
    """Where the gateway's knowledge of prefix caches comes from: its own index, or the engines' true state."""

    INDEX = "index"
    EXACT = "exact"


class Clients(msgspec.Struct, frozen=True):
    """What clients do when refused or kept waiting.

    retries     how often one comes again after a 429 (OpenAI's SDKs: 2)
    obey        whether they wait as long as Retry-After says; else, and where nothing was said, 0.5 s doubled each
                time up to 8 s, less up to a quarter by chance, as those SDKs do
    patience_s  for how long one waits for its first token before it gives up; it says so in advance (deadline)
    """

    retries: int = 0
    obey: bool = True
    patience_s: float | None = None


class Trouble(StrEnum):
    """What may befall a group."""

    LOSE = "lose"  # a rank falls out: all jobs fail at once, the group is back empty after `for_s`
    SLOW = "slow"  # all steps take `factor` times as long for `for_s`
    DRAIN = "drain"  # an operator has it get nothing new for `for_s`; it finishes what it has and keeps its cache


class Fault(msgspec.Struct, frozen=True):
    """Something that befalls one group (by place in the fleet) at a moment. `for_s` None: for ever. `only`: a slow
    group is so at steps with prompt tokens (prefill), at those without (decode), or at both if it is empty."""

    at_s: float
    group: int
    trouble: Trouble = Trouble.LOSE
    for_s: float | None = None
    factor: float = 2.0
    only: str = ""


class Options(msgspec.Struct, frozen=True):
    """How a fleet is replayed.

    expected_output  output tokens that the gateway expects of a request; None: clients say max_tokens, and mean it
    scrape_s         how often engines' metrics are read; None: never. `scrape_age_s`: how old they are when they arrive
    lost_events      share of what the index would have learnt that never reaches it, 0 to 1
    horizon_s        closed loops send nothing after it, and what is not over by then is cut; None: to the last token
    leaping          False: every decode step by itself, to compare
    slow_start_s     how long a group that comes up is given fewer requests at once while others have room
    slow_factor      how many times as long as its peers a group must take to be ejected as slow; 0: none is
    hedge_share      hedges as a share of all requests, at most; 0: none. Only where slow groups are looked for
    classes          service classes by name; a request without a known one is STANDARD
    """

    seed: int = 0
    view: View = View.INDEX
    expected_output: int | None = 350
    scrape_s: float | None = 1.0
    scrape_age_s: float = 0.0
    lost_events: float = 0.0
    horizon_s: float | None = None
    leaping: bool = True
    standard: Slo = STANDARD
    classes: Mapping[str, Slo] = MappingProxyType({})
    clients: Clients = Clients()
    faults: tuple[Fault, ...] = ()
    slow_start_s: float = 0.0
    slow_factor: float = 0.0
    hedge_share: float = 0.0
