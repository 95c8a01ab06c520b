"""Checks the placement of engines on link domains, which are sets of GPUs that fast links connect.

The GPUs of an engine are divided evenly among its domains, in whole TP groups. A GPU is used by one
engine only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from policies.sizing.parallel_layout import Layout


class PlacedGroup(msgspec.Struct, frozen=True):
    """An engine whose placement is checked: its layout, and the link domains that contain its GPUs.

    A link domain is a set of GPUs that fast links connect.
    """

    layout: Layout
    domains: Sequence[str]

    @property
    def domain_gpus(self) -> int:
        """Return the number of GPUs that the engine uses in each of its domains, rounded up."""
        return -(-self.layout.gpus // len(self.domains))


def placement_problems(
    sizes: Mapping[str, int], groups: Sequence[PlacedGroup]
) -> Iterator[tuple[int, str]]:
    """Check whether engines fit on the GPUs where they are placed, and yield their problems.

    sizes   number of GPUs of each link domain (GPUs connected by fast links)
    groups  the engines; those of unknown size are left out

    Yields (index of the engine, problem). The problem is a text that also states what is valid.
    """
    used = dict.fromkeys(sizes, 0)
    for place, group in enumerate(groups):
        problem = _problem(sizes, group)
        if problem:
            yield place, problem
            continue
        for name in group.domains:
            used[name] += group.domain_gpus
            if used[name] > sizes[name]:
                yield (
                    place,
                    f"the groups of link domain {name} take {used[name]} GPUs, and it has "
                    f"{sizes[name]}: GPUs would be shared [domain-gpus, seed 003]",
                )


def _problem(sizes: Mapping[str, int], group: PlacedGroup) -> str:
    # Return as text why a group alone cannot be placed; empty if it can.
    layout, count = group.layout, len(group.domains)
    unknown = [name for name in group.domains if name not in sizes]
    if unknown:
        known = ", ".join(sizes) or "none"
        return f"unknown link domain {', '.join(unknown)}; valid: {known} [domain-name]"
    if len(set(group.domains)) < count:
        return "a link domain is named twice; valid: once each [domain-name]"
    if layout.gpus % count or layout.gpus // count % layout.tp:
        counts = [n for n in range(1, layout.gpus // layout.tp + 1) if _is_even(layout, n)]
        return (
            f"{layout.label} cannot be divided over {count} link domains in whole TP groups; "
            f"valid: {', '.join(map(str, counts))} domains [domain-split, seed 004]"
        )
    return ""


def _is_even(layout: Layout, domains: int) -> bool:
    return not (layout.gpus % domains or layout.gpus // domains % layout.tp)
