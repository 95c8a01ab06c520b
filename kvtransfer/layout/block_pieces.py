"""BlockPieces: where the bytes of one KV block lie in a rank's memory, as contiguous pieces.

A KV store saves a block as the bytes of its pieces, one after another, without knowing the layout.
Two ranks with equal layouts have equal pieces, however many blocks each has.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvtransfer.layout.kv_layout import KvLayout


class BlockPieces:
    """Where the bytes of one block lie in a rank's memory.

    piece_bytes  size in bytes of every piece, a contiguous range of memory
    offsets      distance in bytes from the start of the block to each of its pieces
    """

    def __init__(self, layout: KvLayout, rank: int) -> None:
        stage = rank // layout.tp
        steps, layers = layout.steps(stage), len(layout.layers_of(stage))
        self._block_step = steps.block
        if layout.order.is_block_outermost:
            self.piece_bytes, self.offsets = steps.block, [0]
            return
        # A block of a layer is one piece, or one per head if heads lie outside of the blocks.
        self.piece_bytes = steps.block
        heads = layout.rank_layer_bytes // steps.block
        self.offsets = [
            layer * steps.layer + head * steps.head
            for layer in range(layers)
            for head in range(heads)
        ]

    def of(self, memory: memoryview, block: int) -> Sequence[memoryview]:
        """Return the memory of one block as pieces, in the order of `offsets`.

        `memory` is all KV memory of a rank.
        """
        place, size = block * self._block_step, self.piece_bytes
        return [memory[place + offset : place + offset + size] for offset in self.offsets]


def block_format(layout: KvLayout) -> str:
    """Return a text that is equal for two layouts if their blocks can be exchanged byte by byte.

    It contains everything that a layout states, except the number of blocks.
    """
    return replace(layout, blocks=1).fingerprint()
