"""Checks that an engine's arguments for its KV transfer agent are consistent with each other."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import Transport


def check_arguments(
    layout: KvLayout,
    regions: Sequence[Region],
    transports: Sequence[Transport],
    rank: int | None,
    group: str,
) -> None:
    ranks = range(layout.ranks) if rank is None else [rank]
    if len(regions) != len(ranks) or not transports:
        raise ValueError(
            f"the layout has {len(ranks)} ranks and needs a region for each, but "
            f"{len(regions)} regions and {len(transports)} transports were given"
        )
    if rank is not None and not (0 <= rank < layout.ranks and group):
        raise ValueError(
            f"an agent that serves only rank {rank} of {layout.ranks} needs a `group`: a name "
            "that all ranks of its engine share"
        )
    _all_sealed_or_none(transports)
    _check_regions(layout, ranks, regions, transports)


def _check_regions(
    layout: KvLayout,
    ranks: Sequence[int],
    regions: Sequence[Region],
    transports: Sequence[Transport],
) -> None:
    # Raise ValueError for KV memory that does not fit the layout or a transport.
    sizes = [layout.rank_block_bytes(rank) for rank in ranks]
    if [region.block_bytes for region in regions] != sizes:
        raise ValueError(
            f"every region must consist of blocks of {sizes} bytes, as the layout requires"
        )
    if layout.blocks and any(region.blocks != layout.blocks for region in regions):
        raise ValueError(f"every region must have {layout.blocks} blocks, as the layout requires")
    for transport in transports:
        if transport.name in ("rdma", "shm") and not layout.order.is_block_outermost:
            raise ValueError(
                f"the transport {transport.name} needs memory in which blocks are the "
                f"outermost dimension, but the layout has the memory order {layout.order}"
            )


def _all_sealed_or_none(transports: Sequence[Transport]) -> None:
    # Raise ValueError if some transports encrypt KV and others would send it as plain text.
    plain = [transport.name for transport in transports if transport.is_sealed is False]
    if plain and any(transport.is_sealed for transport in transports):
        raise ValueError(
            f"the transports {', '.join(plain)} would send KV unencrypted although others "
            "encrypt it; leave them out"
        )
