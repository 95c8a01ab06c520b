"""A page of metrics as tests ask it. Not here: getting the page."""

from __future__ import annotations


def series(page: str, name: str, **labels: str) -> list[str]:
    """The lines of a metric's series that carry these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return [line for line in found if all(each in line for each in wanted)]


def total(page: str, name: str, **labels: str) -> float:
    """The sum over a metric's series that carry these labels."""
    return sum(float(line.rpartition(" ")[2]) for line in series(page, name, **labels))
