"""The result of a prefix lookup in a large pool: the few endpoints with part of the prompt cached.

A list of tokens by slot would be as long as the pool, for each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence


class WideMatch:
    """A prefix of a prompt that many endpoints have cached, such as a common system prompt.

    The endpoints are not listed: each can be looked up with `holds`.

    tokens  length of the prefix in tokens
    """

    __slots__ = ("_oldest_alive", "_stamps", "tokens")

    def __init__(self, tokens: int, stamps: Mapping[int, int], oldest_alive: Sequence[int]) -> None:
        """Create the match for a cached prefix of `tokens` tokens.

        stamps        when each endpoint that has the prefix last used it (PrefixIndex), by slot
        oldest_alive  the oldest stamp that is still valid, by slot
        """
        self.tokens = tokens
        self._stamps, self._oldest_alive = stamps, oldest_alive

    def __len__(self) -> int:
        """Return how many endpoints have the prefix cached, those included that have evicted it."""
        return len(self._stamps)

    def holds(self, slot: int) -> bool:
        """Return whether the endpoint in this slot is believed to have the prefix cached."""
        stamp = self._stamps.get(slot)
        return stamp is not None and stamp >= self._oldest_alive[slot]

    def has_holders(self) -> bool:
        """Return whether any endpoint is believed to have the prefix cached."""
        oldest = self._oldest_alive
        return any(stamp >= oldest[slot] for slot, stamp in self._stamps.items())

    def select_holders(self, slots: Iterable[int]) -> Iterator[int]:
        """Return an iterator over those of these slots whose endpoints have the prefix cached."""
        # Of hundreds of slots, few may hold it: filter() passes over the others in C.
        return filter(self.holds, filter(self._stamps.__contains__, slots))

    def holders(self) -> Iterator[int]:
        """Return an iterator over the slots of all endpoints that have the prefix cached.

        Those come first that used it least recently.
        """
        return filter(self.holds, self._stamps)


class PrefixMatch(Sequence[int]):
    """How many tokens of one prompt each endpoint is believed to have cached, by slot.

    A slot is the number of an endpoint. Reading an item looks it up, so that no list as long as the
    pool is needed.

    narrow   tokens by slot (EndpointLoad.slot), for prefixes that few endpoints have
    wide     shorter prefixes that many endpoints have, longest first; they change with the index
    longest  the largest number of tokens that any endpoint has
    """

    __slots__ = ("_slots", "longest", "narrow", "wide")

    def __init__(
        self, slots: int, narrow: dict[int, int], wide: Sequence[WideMatch], longest: int
    ) -> None:
        # Initialize for `slots` slots; `longest` is the largest number of tokens in `narrow`.
        self._slots = slots
        self.narrow, self.wide, self.longest = narrow, wide, longest
        for prefix in wide:
            if prefix.tokens > longest and prefix.has_holders():
                self.longest = prefix.tokens
                break

    def __len__(self) -> int:
        return self._slots

    def __getitem__(self, slot: int) -> int:  # type: ignore[override]
        if not 0 <= slot < self._slots:
            raise IndexError(slot)
        tokens = self.narrow.get(slot)
        if tokens is not None:
            return tokens
        for prefix in self.wide:
            if prefix.holds(slot):
                return prefix.tokens
        return 0

    def look_up(self, slots: Iterable[int]) -> None:
        """Read the numbers of cached tokens of these endpoints now, so that they do not change."""
        for slot in slots:
            if slot < self._slots and slot not in self.narrow:
                self.narrow[slot] = self[slot]

    def forget_others(self) -> None:
        """Forget the numbers of all endpoints that were not looked up.

        Call it before the index changes, since these numbers would change with it.
        """
        self.wide = ()


def longest_match(cached_by_slot: Sequence[int]) -> int:
    """Return the largest number of prompt tokens that any endpoint has cached; 0: none."""
    # The type is compared first, because isinstance() of an abstract class costs more than max().
    if type(cached_by_slot) is not list and isinstance(cached_by_slot, PrefixMatch):
        return cached_by_slot.longest
    return max(cached_by_slot) if cached_by_slot else 0
