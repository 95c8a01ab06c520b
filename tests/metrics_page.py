"""Reads series from a metrics page in Prometheus text format."""

from __future__ import annotations


def series(page: str, name: str, **labels: str) -> list[str]:
    pairs = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return [line for line in lines if all(pair in line for pair in pairs)]


def total(page: str, name: str, **labels: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in series(page, name, **labels))
