"""Computes with numpy where the KV of an engine's ranks must lie, independently of the tested code.

The KV of a request is an array of rows, one per token. Where single tokens cannot be located, it is
an array of pages. `view` gives a rank's memory the same axes, whatever its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.kv_layouts import CACHE_TYPES, CacheMemory, CacheType, LayoutRow

Bytes = NDArray[np.uint8]
LAYERS, BLOCKS, HEAD_DIM, LATENT_DIM = 2, 24, 16, 24
TOKENS = 75


@dataclass
class Shape:
    """The KV cache of one engine in a layout test: the model's shape, the memory and the ranks."""

    kv_heads: int
    is_latent: bool
    memory: CacheMemory
    kind: CacheType
    tp: int

    @property
    def parts(self) -> int:
        return 1 if self.is_latent else 2

    @property
    def row_bytes(self) -> int:
        dim = LATENT_DIM if self.is_latent else HEAD_DIM
        return dim * self.kind.n_bytes + self.kind.scale_bytes

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.kv_heads // self.tp)

    def heads_of(self, rank: int) -> list[int]:
        # With more ranks than heads, neighbouring ranks have the same head.
        first = rank * self.kv_heads // self.tp
        return list(range(first, first + self.heads_per_rank))

    @property
    def rank_bytes(self) -> int:
        rows = LAYERS * BLOCKS * self.heads_per_rank * self.memory.block_tokens * self.parts
        return rows * self.row_bytes

    def view(self, memory: Bytes) -> Bytes:
        """Return a view of memory with the axes (layer, block, head, token, part, byte).

        For a cache of pages, the axes are (layer, block, head, byte).
        """
        tokens, heads = self.memory.block_tokens, self.heads_per_rank
        if self.memory.content == "pages":
            return memory.reshape(LAYERS, BLOCKS, heads, tokens * self.parts * self.row_bytes)
        letters = _axes(self.memory)
        sizes = {"l": LAYERS, "b": BLOCKS, "h": heads, "n": tokens, "p": self.parts}
        physical = memory.reshape(*(sizes[letter] for letter in letters), self.row_bytes)
        return physical.transpose(*(letters.index(letter) for letter in "lbhnp"), len(letters))


def _axes(memory: CacheMemory) -> str:
    # Return the axes of the memory in order, one letter each; p is the axis of keys and values.
    if memory.content == "tokens":
        return memory.order.replace("c", "p")
    if memory.content == "heads":
        return memory.order.replace("hn", "hpn").removesuffix("c")
    assert memory.content == "planes"
    return memory.order[:2] + "p" + memory.order[2:4]


def shape_of(
    kv_heads: int, is_latent: bool, memory: CacheMemory, cache_type: str, tp: int
) -> Shape:
    kind = CACHE_TYPES[memory.cache_type or cache_type]
    return Shape(kv_heads, is_latent, memory, kind, tp)


@dataclass
class Request:
    """What a test transfers of a request in one group of layers: its KV, and its blocks at both
    engines.

    rows  array (layer, part, head, token, byte); of pages: (layer, head, block, byte)
    """

    rows: Bytes
    tokens: int
    src_blocks: list[int]
    dst_blocks: list[int]

    def places(
        self, shape: Shape, rank: int, blocks: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], Bytes]]:
        """Yield each piece of a rank's memory that a transfer fills, with the expected bytes."""
        for layer in range(LAYERS):
            for local, head in enumerate(shape.heads_of(rank)):
                if shape.memory.content == "pages":
                    for index in range(self.rows.shape[2]):
                        yield (layer, blocks[index], local), self.rows[layer, head, index]
                    continue
                for token in range(self.rows.shape[3]):
                    block, slot = divmod(token, shape.memory.block_tokens)
                    for part in range(shape.parts):
                        yield (
                            (layer, blocks[block], local, slot, part),
                            self.rows[layer, part, head, token],
                        )


def requests_of(row: LayoutRow, src: Shape, rng: np.random.Generator) -> list[Request]:
    """Return what a test transfers of one request, for each group of layers.

    All groups share the memory, but each block belongs to one of them. A group with a sliding
    window has only the blocks in its window.

    row  row of the table of layouts
    src  the sending engine
    """
    most = TOKENS // 16 + 1
    from_blocks, to_blocks = (rng.permutation(BLOCKS)[: 2 * most].tolist() for _ in range(2))
    made = []
    for index, window in enumerate(row.windows or (0,)):
        tokens = TOKENS if not window else TOKENS - (TOKENS - window) // 16 * 16
        blocks = slice(index * most, (index + 1) * most)
        made.append(
            Request(random_rows(src, tokens, rng), tokens, from_blocks[blocks], to_blocks[blocks])
        )
    return made


def random_rows(shape: Shape, tokens: int, rng: np.random.Generator) -> Bytes:
    """Return random bytes as KV cache of `tokens` tokens, rounded up to whole blocks.

    The array has the axes of the memory's content: pages, or rows of tokens.
    """
    size = shape.memory.block_tokens
    blocks = -(-tokens // size)
    if shape.memory.content == "pages":
        page = size * shape.parts * shape.row_bytes
        return rng.integers(0, 256, (LAYERS, shape.kv_heads, blocks, page), np.uint8)
    tokens = blocks * size
    return rng.integers(
        0, 256, (LAYERS, shape.parts, shape.kv_heads, tokens, shape.row_bytes), np.uint8
    )


def create(folder: Path, side: str, shape: Shape, rng: np.random.Generator) -> list[Bytes]:
    """Return the memory of each rank, as files of random bytes that other processes can map."""
    memories = []
    for rank in range(shape.tp):
        path = folder / f"{side}-{rank}"
        memory = np.memmap(path, np.uint8, "w+", shape=(shape.rank_bytes,))
        memory[:] = rng.integers(0, 256, shape.rank_bytes, np.uint8)
        memories.append(memory)
    return memories
