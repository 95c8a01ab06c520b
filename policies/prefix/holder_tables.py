"""Tables of the endpoints that have a block of a prompt cached, for blocks that many of them have.

A table can be changed in place, however many endpoints it lists. prefix_index.py has the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.prefix.predicted_cache import MAX_SLOTS

TABLE_COST_BYTES = 500
"""Upper bound of the memory of an empty table, in bytes."""

HOLDER_COST_BYTES = 160
"""Upper bound of the memory of one endpoint in a table: its dict entry, its stamp and its slot."""

_SLOT = MAX_SLOTS - 1
_EXAMINED = 2


class HolderTables:
    """Tables of holders: the endpoints that have a block cached, and when each last used it.

    Each table has a negative number. A prefix index stores it in place of a block's packed holders.
    Blocks that were always used together share one table. The garbage collector does not visit the
    tables, because they consist of ints.

    stamps  the tables by number: for each holder's slot, its stamp (PrefixIndex)
    blocks  number of blocks that use each table, by its number
    bytes   upper bound of the memory of all tables
    """

    __slots__ = ("_last", "blocks", "bytes", "stamps")

    def __init__(self) -> None:
        self.stamps: dict[int, dict[int, int]] = {}
        self.blocks: dict[int, int] = {}
        self.bytes = 0
        self._last = 0

    def create(self, stamps: Iterable[int], blocks: int) -> int:
        """Create a table of these stamps, which `blocks` blocks share; return its number."""
        self._last -= 1
        table = {stamp & _SLOT: stamp for stamp in stamps}
        self.stamps[self._last] = table
        self.blocks[self._last] = blocks
        self.bytes += TABLE_COST_BYTES + len(table) * HOLDER_COST_BYTES
        return self._last

    def add_block(self, number: int) -> None:
        """Record that one more block uses a table."""
        self.blocks[number] += 1

    def release(self, number: int, blocks: int = 1) -> None:
        """Record that `blocks` blocks use a table no longer; delete it if none is left."""
        self.blocks[number] -= blocks
        if not self.blocks[number]:
            self.bytes -= TABLE_COST_BYTES + len(self.stamps.pop(number)) * HOLDER_COST_BYTES
            del self.blocks[number]

    def is_used_only_by(self, number: int, blocks: int) -> bool:
        """Return whether exactly `blocks` blocks use a table."""
        return self.blocks[number] == blocks

    def renew(self, number: int, stamp: int, oldest_alive: Sequence[int]) -> None:
        """Replace the stamp of one holder in a table, and remove some holders that have expired.

        oldest_alive  the oldest stamp that is still valid, by slot
        """
        stamps = self.stamps[number]
        before = len(stamps)
        stamps.pop(stamp & _SLOT, None)
        _remove_expired(stamps, oldest_alive)
        stamps[stamp & _SLOT] = stamp
        self.bytes += (len(stamps) - before) * HOLDER_COST_BYTES

    def lengthen(
        self, reach: dict[int, int], number: int, blocks: int, oldest_alive: Sequence[int]
    ) -> None:
        """Correct how much of a prompt slots hold: those in a table hold its first blocks.

        reach         number of the prompt's blocks by slot; smaller ones are corrected
        number        the table
        blocks        number of the prompt's blocks that all holders in the table hold
        oldest_alive  the oldest stamp that is still valid, by slot

        Expired holders can leave more entries in a table than in that of the blocks before.
        """
        stamps = self.stamps[number]
        for slot, fewer in reach.items():
            if fewer < blocks and stamps.get(slot, 0) >= oldest_alive[slot]:
                reach[slot] = blocks


def _remove_expired(stamps: dict[int, int], oldest_alive: Sequence[int]) -> None:
    # Remove expired stamps from the front of a table, up to a few valid ones.
    #
    # These are moved to the end, so that all holders are examined in turn.
    valid = 0
    while valid < _EXAMINED and stamps:
        slot = next(iter(stamps))
        stamp = stamps.pop(slot)
        if stamp >= oldest_alive[slot]:
            stamps[slot] = stamp
            valid += 1
