"""Keeps a pool's endpoints sorted, so that choosing one (a pick) need not look at all of them.

A pick thus costs the same in a pool of a thousand endpoints as in one of ten. CandidateOrder sorts
by the key of the policy's ranking (policies.policy_types.Ranking). At each pick, it ranks again
only the endpoints whose load has changed. The policy then scores a shortlist of the best endpoints.

The shortlist of a retry leaves out endpoints that failed the request. If the policy prefers proven
endpoints, endpoints without a success since their last failure are left out too. If no endpoint of
the shortlist can serve the request, all candidates are scored.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import inf
from operator import itemgetter

from policies import routing_algorithm
from policies.endpoint_load import EndpointLoad, LoadChanges
from policies.filters import available, below_cap, prefer_proven, untried
from policies.policy_types import Policy, Ranking
from policies.prefix.prefix_match import PrefixMatch, WideMatch
from policies.routing_types import Candidate, Pick, RoutingQuery

LEAST_CANDIDATES = 24
"""Smallest number of candidates for which a sorted order is kept; scanning fewer costs less."""

SHORTLIST = 4
"""Minimum number of candidates in a shortlist.

A request that is slow at one of them can then move to another.
"""

SHORTLIST_UNSETTLED = 12
"""Maximum number of candidates per group that are scored because their place in the order is
uncertain.

These are the ones for which Ranking.is_settled is false.
"""

MOST_RANKED_AGAIN = 32
"""Maximum number of the best entries that are ranked again at a pick.

They are ranked again because their sort keys may have risen since (Ranking.rises).
"""

STEPS = 64
"""Maximum number of entries of a group that are searched for an endpoint with a cached prefix of
the prompt.
"""

MOST_LISTED = 32
"""Number of endpoints with a cached prefix up to which all are compared if the search finds few.

If more endpoints have it, those are added that used it least recently.
"""

UNTESTED_TRIED = 4
"""Number of untested candidates (Ranking.tests) that a pick looks at to find an idle one."""

MOST_FAILED = 32
"""Number of failed endpoints of a request above which its retry does not use the sorted order.

The retry scans the remaining candidates instead. There are few of them: a retry that has checked
the health of an endpoint leaves out all others.
"""

LEVELS = 8
"""Maximum number of different prefixes of a prompt that a shortlist considers.

Each is a prefix that many endpoints have cached, such as a system prompt (PrefixMatch.wide).
"""

REDRAW_S = 0.1
"""Minimum seconds until another picked endpoint gets a new random number, which breaks ties.

At thousands of requests per second, endpoints that have just been used thus keep their places among
equals. The memory of a few dozen endpoints and their sockets is in the processor's cache when it is
used again; that of a thousand is not. At few requests, and in the long run, ties are random.
"""

_SLOT_OF, _GROUP_AND_KEY = itemgetter(2), itemgetter(3, 0)

Entry = tuple[float, float, int, int, int]
"""An entry of the sorted order, as a tuple of five numbers.

The sort key, a random number that breaks ties, the endpoint's slot (EndpointLoad.slot), its group
(Ranking.group), and its weight: how much it adds towards Ranking.depth.
"""


SurePlace = tuple[float, int, int]
"""The sort key, the group and the weight of a candidate whose weight is not 0."""


class CandidateOrder:
    """Keeps the endpoints of one route sorted by cost, so that most picks look at a few of them.

    The order is built by build(), or at the first pick, and updated at every later pick. Use it
    from one event loop only.
    """

    __slots__ = (
        *("_by_slot", "_candidates", "_changes", "_conditions", "_count", "_entries", "_groups"),
        *("_numbers", "_pending", "_policy", "_prefers_proven", "_ranking", "_redraw_at"),
        *("_retry_conditions", "_untested", "eligible"),
    )

    def __init__(
        self,
        policy: Policy,
        ranking: Ranking,
        candidates: Sequence[Candidate],
        changes: LoadChanges,
    ) -> None:
        # Initialize without sorting; `changes` records changed loads from the first pick on.
        self._policy, self._ranking = policy, ranking
        self._candidates, self._changes = candidates, changes
        self._by_slot: dict[int, Candidate] = {}
        self._conditions = tuple(
            filter_
            for filter_ in policy.first_attempt_filters
            if filter_ not in (available, below_cap)
        )
        self._prefers_proven = prefer_proven in policy.filters
        self._retry_conditions = tuple(
            filter_
            for filter_ in policy.filters
            if filter_ not in (available, below_cap, prefer_proven)
        )
        self._count = 0
        self._entries: dict[int, Entry] = {}
        self._groups: dict[int, list[Entry]] = {}
        self._numbers: list[int] = []
        self._pending = -1
        self._redraw_at = 0.0
        self._untested: deque[int] = deque()  # slots
        self.eligible = 0

    def pick(self, query: RoutingQuery) -> Pick | None:
        """Choose the endpoint for a request, like routing_algorithm.pick(), from a shortlist.

        Returns None if no endpoint may serve the request.
        """
        failed = query.failed_endpoints
        if len(failed) > MOST_FAILED and untried in self._retry_conditions:
            left = [item for item in self._candidates if item.endpoint.name not in failed]
            return routing_algorithm.pick(self._policy, query, left)
        self._catch_up(query)
        shortlist = self._shortlist(query)
        if shortlist:
            match = query.cached_by_slot
            wide = match if isinstance(match, PrefixMatch) and match.wide else None
            if wide is not None:
                wide.look_up([candidate.load.slot for candidate in shortlist])
            eligible = max(len(shortlist), self.eligible - len(failed))
            pick = routing_algorithm.pick(self._policy, query, shortlist, eligible)
            if pick is not None:
                if wide is not None:
                    wide.forget_others()
                # Rank the picked candidate again, because the picker may have changed state that
                # affects its rank.
                self._pending = pick.candidate.load.slot
                return pick
        return routing_algorithm.pick(self._policy, query, self._candidates)

    # Sorting: updates of the order after changes of load

    def _catch_up(self, query: RoutingQuery) -> None:
        # Update the positions of candidates whose loads have changed since the last pick.
        changes = self._changes
        if not self._by_slot:
            for _ in self.build(query):
                pass
        elif changes.count != self._count:
            slots = changes.since(self._count)
            if slots is None or len(slots) > len(self._candidates):
                slots = list(self._by_slot)
            self._count = changes.count
            changed = set(slots)
            changed.discard(self._pending)
            for slot in changed:
                if slot in self._by_slot:
                    self._rank(slot, query)
        if self._pending >= 0:
            is_redrawn = query.now >= self._redraw_at
            if is_redrawn:
                self._redraw_at = query.now + REDRAW_S
            self._rank(self._pending, query, is_redrawn)
            self._pending = -1
        if self._ranking.rises is not None:
            self._rank_risen(self._ranking.rises, query)

    def _rank_risen(
        self, rises: Callable[[EndpointLoad, float], bool], query: RoutingQuery
    ) -> None:
        # Rank the best entries of each group again whose keys may have risen without a change.
        #
        # An entry that keeps its place after that is current, so the best entries are in the end.
        again: set[int] = set()
        for number in tuple(self._numbers):
            while (slot := self._risen(number, rises, query.now, again)) is not None:
                again.add(slot)
                self._rank(slot, query)

    def _risen(
        self,
        group: int,
        rises: Callable[[EndpointLoad, float], bool],
        now: float,
        again: set[int],
    ) -> int | None:
        # Return the slot of a group's best entries that must be ranked again, if there is one.
        if len(again) < MOST_RANKED_AGAIN:
            for _, _, slot, _, _ in self._groups.get(group, ())[: self._ranking.depth]:
                if slot not in again and rises(self._by_slot[slot].load, now):
                    return slot
        return None

    def build(self, query: RoutingQuery) -> Iterator[None]:
        """Sort all candidates, and yield after each of them, so that a caller can pause.

        Without this call, the first pick sorts all candidates without a pause. `query` only has the
        time and a random generator. Loads that change meanwhile are ranked again at the first pick.
        """
        self._count = self._changes.count
        for candidate in self._candidates:
            candidate.load.changes = self._changes
            self._by_slot[candidate.load.slot] = candidate
            entry = self._entry(candidate, query, query.rng.random())
            if entry is not None:
                self._entries[entry[2]] = entry
                self._groups.setdefault(entry[3], []).append(entry)
            yield
        for entries in self._groups.values():
            entries.sort()
        self._numbers = sorted(self._groups)
        self.eligible = len(self._entries)
        if self._ranking.tests is not None:
            indexes = self._ranking.tests(self._candidates)
            self._untested.extend(self._candidates[index].load.slot for index in indexes)

    def _entry(self, candidate: Candidate, query: RoutingQuery, tie: float) -> Entry | None:
        # Return the candidate's sort key and group; None if it may receive no request.
        load: EndpointLoad = candidate.load
        ranking = self._ranking
        if (
            not load.is_available
            or load.in_flight >= candidate.endpoint.max_concurrency
            or load.in_flight >= load.soft_cap
        ):
            return None
        group = 0 if ranking.group is None else ranking.group(load)
        return ranking.key(candidate, query.now), tie, load.slot, group, self._weight(load)

    def _weight(self, load: EndpointLoad) -> int:
        # Return how much a candidate adds towards `depth`: 0 if its place in the order is
        # uncertain, and all of `depth` if it needs no others.
        ranking = self._ranking
        if ranking.is_settled is not None and not ranking.is_settled(load):
            return 0
        return 1 if ranking.is_certain is None or not ranking.is_certain(load) else ranking.depth

    def _rank(self, slot: int, query: RoutingQuery, is_redrawn: bool = False) -> None:
        old = self._entries.get(slot)
        tie = query.rng.random() if old is None or is_redrawn else old[1]
        new = self._entry(self._by_slot[slot], query, tie)
        if old is not None:
            if new is not None and old == new:
                return
            self._remove(old)
        if new is not None:
            self._entries[slot] = new
            group = self._groups.get(new[3])
            if group is None:
                self._groups[new[3]] = [new]
                insort(self._numbers, new[3])
            else:
                insort(group, new)
        elif old is not None:
            del self._entries[slot]
        self.eligible = len(self._entries)

    def _remove(self, entry: Entry) -> None:
        entries = self._groups[entry[3]]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._groups[entry[3]]
            self._numbers.remove(entry[3])

    # Picking: reads the best candidates from the order

    def _shortlist(self, query: RoutingQuery) -> list[Candidate]:
        match, by_slot = query.cached_by_slot, self._by_slot
        held: dict[int, int]
        wide: Sequence[WideMatch] = ()
        # The type is compared, because isinstance() of an abstract class costs more.
        if type(match) is PrefixMatch:
            held, wide = match.narrow, match.wide[:LEVELS]
        else:
            held = {slot: count for slot, count in enumerate(match) if count}
        found = self._holders(held, query)
        least = wide[0].tokens if wide else 0
        chosen = self._unbeatable(found, held, least) if found else None
        if chosen is None:
            chosen = self._possible_best(found, held, wide, query)
        if len(chosen) < SHORTLIST:
            self._fill_up(query, chosen)
        if self._untested:
            self._add_untested(query, chosen)
        return [by_slot[slot] for slot in chosen]

    def _unbeatable(
        self, found: list[Entry], held: dict[int, int], least: int
    ) -> dict[int, None] | None:
        # Return the slots of holders that no candidate can beat, and of others up to SHORTLIST.
        #
        # They hold most of the prompt, at least the `least` tokens of prefixes that many hold, and
        # are among the best of the order. The result is None if there are none.
        most = max(held.values())
        if most < least:
            return None
        number, depth = self._numbers[0], self._ranking.depth
        lowest = self._groups[number][0][0]
        best = [
            entry
            for entry in found
            if entry[0] == lowest
            and entry[3] == number
            and entry[4] >= depth
            and held[entry[2]] == most
        ]
        if not best:
            return None
        for other in self._numbers[1:]:
            if self._groups[other][0][0] < lowest:
                return None
        if len(best) > SHORTLIST:
            best.sort()
            del best[SHORTLIST:]
        chosen: dict[int, None] = dict.fromkeys(map(_SLOT_OF, best))
        for entry in found:
            if len(chosen) == SHORTLIST:
                break
            chosen[entry[2]] = None
        return chosen

    def _possible_best(
        self,
        found: list[Entry],
        held: dict[int, int],
        wide: Sequence[WideMatch],
        query: RoutingQuery,
    ) -> dict[int, None]:
        # Return the slots of all candidates that might be the best one.
        listed = self._leaders(found, held) if len(found) > SHORTLIST else found
        chosen = dict.fromkeys(map(_SLOT_OF, listed)) if listed else {}
        best = [inf] * (len(wide) + 1)
        sure = _sure_places(listed, held, wide[0].tokens if wide else 0) if listed else []
        unfinished: set[int] = set()
        for number in self._numbers:
            entries = self._groups[number]
            if sure:
                best[0] = min(best[0], self._beaten_from(sure, number))
            if entries[0][0] < best[0]:
                self._add_leaders(entries, query, wide, best, chosen, unfinished)
        for level in unfinished:
            if len(wide[level]) <= MOST_LISTED:
                self._add_all_leaders(wide[level], query, chosen)
            elif not level and best[0] == inf:  # few of the best candidates hold the prefix
                self._add_holders(wide[0], query, chosen)
        return chosen

    def _holders(self, held: dict[int, int], query: RoutingQuery) -> list[Entry]:
        # Return the entries of candidates that have part of the prompt cached and may serve it.
        #
        # One that may not serve it must not displace those that may.
        entries: dict[int, Entry] = self._entries
        found = []
        for slot in held:
            entry = entries.get(slot)
            if entry is not None:
                found.append(entry)
        if query.failed_endpoints or self._conditions:
            found = [entry for entry in found if self._meets_conditions(entry[2], query)]
        return found

    def _leaders(self, found: list[Entry], held: dict[int, int]) -> list[Entry]:
        # Return those of the entries that no other one is certain to beat, and sort `found`.
        #
        # There are at least SHORTLIST of them. `held` has the number of cached tokens by slot.
        if len(self._numbers) > 1:
            found.sort(key=_GROUP_AND_KEY)
        else:
            found.sort()
        depth, longest = self._ranking.depth, max([held[entry[2]] for entry in found])
        leaders: list[Entry] = []
        # Number of leaders until none of the following entries can be the best. Entries of another
        # group may have lower keys.
        missing = depth if len(self._numbers) == 1 else len(found) * depth + 1
        for entry in found:
            key, tokens = entry[0], held[entry[2]]
            if len(leaders) >= SHORTLIST:
                if missing <= 0:
                    break
                better = 0
                for other in leaders:
                    if other[0] <= key and held[other[2]] >= tokens:
                        better += other[4]
                if better >= depth:
                    continue
            leaders.append(entry)
            if tokens >= longest:
                missing -= entry[4]
        return leaders

    def _add_all_leaders(
        self, prefix: WideMatch, query: RoutingQuery, chosen: dict[int, None]
    ) -> None:
        # Add the candidates that hold a prefix, without those that others are certain to beat.
        entries = self._entries
        found = [entries[slot] for slot in prefix.holders() if self._may_serve(slot, query)]
        if found:
            held = dict.fromkeys(map(_SLOT_OF, found), prefix.tokens)
            chosen |= dict.fromkeys(map(_SLOT_OF, self._leaders(found, held)))

    def _add_holders(self, prefix: WideMatch, query: RoutingQuery, chosen: dict[int, None]) -> None:
        # Add a few candidates that hold a prefix, those first that used it least recently.
        added = 0
        for slot in prefix.holders():
            if self._may_serve(slot, query):
                chosen[slot] = None
                added += 1
                if added == SHORTLIST:
                    return

    def _beaten_from(self, sure: list[SurePlace], group: int) -> float:
        # Return the key from which on no candidate of a group that is not listed can be the best.
        #
        # Enough listed candidates have lower keys. The result is inf if there are not enough.
        missing = self._ranking.depth
        for key, number, weight in sure:
            if number <= group:
                missing -= weight
                if missing <= 0:
                    return key
        return inf

    def _add_leaders(
        self,
        entries: list[Entry],
        query: RoutingQuery,
        wide: Sequence[WideMatch],
        best: list[float],
        chosen: dict[int, None],
        unfinished: set[int],
    ) -> None:
        # Add to `chosen` the candidates of one group that might beat all candidates seen before.
        #
        # For each prefix in `wide`, these are the first that hold it, and the first of all.
        # wide    prefixes that too many endpoints hold to list them, longest first
        # best    the key from which on others certainly do better, by the longest of these prefixes
        #         that a candidate holds (the last entry: none of them). Candidates that hold more
        #         count for all shorter prefixes. Updated for the following groups
        # unfinished  the numbers of prefixes that further candidates of the group may hold
        unsettled = 0
        lowest = inf
        for level, own in enumerate(best):
            lowest = min(lowest, own)
            if entries[0][0] >= lowest:
                return
            prefix = wide[level] if level < len(wide) else None
            taken = 0
            for key, _, slot, _, weight in self._entries_holding(prefix, entries):
                if key >= lowest:
                    break
                if slot not in chosen:
                    if not self._meets_conditions(slot, query):
                        continue
                    unsettled += not weight
                    if unsettled > SHORTLIST_UNSETTLED:
                        return
                    chosen[slot] = None
                taken += weight
                if taken >= self._ranking.depth:
                    best[level] = lowest = key
                    break
            else:
                if prefix is not None and len(entries) > STEPS:
                    unfinished.add(level)

    def _add_untested(self, query: RoutingQuery, chosen: dict[int, None]) -> None:
        # Add one idle candidate whose speed is known only from its label. They take turns.
        is_tested, untested = self._ranking.is_tested, self._untested
        for _ in range(min(UNTESTED_TRIED, len(untested))):
            slot = untested.popleft()
            load = self._by_slot[slot].load
            if is_tested is not None and is_tested(load):
                continue
            untested.append(slot)
            if slot not in chosen and not load.in_flight and self._may_serve(slot, query):
                chosen[slot] = None
                return

    def _may_serve(self, slot: int, query: RoutingQuery) -> bool:
        return slot in self._entries and self._meets_conditions(slot, query)

    def _meets_conditions(self, slot: int, query: RoutingQuery) -> bool:
        conditions = self._conditions
        if query.failed_endpoints:
            if self._prefers_proven and not self._by_slot[slot].load.is_proven:
                return False
            conditions = self._retry_conditions
        candidate = (self._by_slot[slot],)
        for filter_ in conditions:  # noqa: SIM110 - a generator costs more
            if not filter_(query, candidate):
                return False
        return True

    def _entries_holding(self, prefix: WideMatch | None, entries: list[Entry]) -> Iterator[Entry]:
        # Return the best of these entries, as far as they hold the prefix (None: any).
        #
        # Hundreds of entries may be passed over for each that holds it, so the loop runs in C.
        best = islice(entries, STEPS)
        if prefix is None:
            return best
        return map(self._entries.__getitem__, prefix.select_holders(map(_SLOT_OF, best)))

    def _fill_up(self, query: RoutingQuery, chosen: dict[int, None]) -> None:
        for number in self._numbers:
            for entry in islice(self._groups[number], STEPS):
                if entry[2] not in chosen and self._meets_conditions(entry[2], query):
                    chosen[entry[2]] = None
                    if len(chosen) >= SHORTLIST:
                        return


def _sure_places(listed: list[Entry], held: dict[int, int], least: int) -> list[SurePlace]:
    # Return the sorted places of those listed candidates that hold at least `least` tokens.
    places = [
        (key, group, weight)
        for key, _, slot, group, weight in listed
        if weight and held[slot] >= least
    ]
    if len(places) > 1:
        places.sort()
    return places


def create_order(
    policy: Policy, candidates: Sequence[Candidate], changes: LoadChanges
) -> CandidateOrder | None:
    """Return a CandidateOrder of these candidates, or None if sorting them does not help.

    It does not help if there are few candidates, or if the policy has no ranking.

    policy      the policy whose ranking sorts the candidates
    candidates  the endpoints of the pool
    changes     records which loads have changed, so that each pick can update the order
    """
    if policy.ranking is None or len(candidates) < LEAST_CANDIDATES:
        return None
    return CandidateOrder(policy, policy.ranking, candidates, changes)
