"""PromQL in small pieces: writing the few shapes that boards and rules need, and reading which series a query asks for.

Reading is for checking queries against a scrape. It is no parser: it knows selectors and label
lists, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

WINDOW = "$__rate_interval"
"""What Grafana fills in: four scrapes or more."""

VARIABLES = ("job", "namespace", "pool", "model")
"""The variables of the boards, named like the labels that they select."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_RANGE = re.compile(r"\[[^\]]*\]")
_LISTED = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(?<![\w:])([a-zA-Z_:][\w:]*)(?![\w:])\s*(\{[^}]*\})?(?!\s*\()")
_MATCHER = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)")
_OWN = re.compile(r"\b((?:penstock|process)_[\w:]*|penstock:[\w:]+)(?:\{([^}]*)\})?")
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", "vector"})


class Asked(msgspec.Struct, frozen=True):
    """A series that a query asks for: its name, and the labels that are matched."""

    name: str
    labels: frozenset[str]


def asked(query: str) -> tuple[Asked, ...]:
    """Every selector of the query."""
    bare = _LISTED.sub(" ", _RANGE.sub("", _STRING.sub('""', query)))
    found = ((match[1], match[2] or "") for match in _SELECTOR.finditer(bare) if match[1].lower() not in _WORDS)
    return tuple(Asked(name, frozenset(_MATCHER.findall(matchers))) for name, matchers in found)


def grouped(query: str) -> frozenset[str]:
    """Every label that the query groups or joins by, but `le`, which buckets have."""
    return frozenset(label for label in _lists(query) if label != "le")


def _lists(query: str) -> Iterator[str]:
    for match in _LISTED.finditer(_STRING.sub('""', query)):
        yield from (label.strip() for label in match[2].split(",") if label.strip())


def filtered(query: str, labels_of: Callable[[str], Collection[str]]) -> str:
    """The query with every selector limited to the boards' variables, as far as `labels_of` a series has them.
    """

    def limited(match: re.Match[str]) -> str:
        name, matchers = match[1], match[2]
        chosen = [f'{label}=~"${label}"' for label in VARIABLES if label in labels_of(name)]
        return f"{name}{{{', '.join([matchers, *chosen] if matchers else chosen)}}}"

    return _OWN.sub(limited, query)


def filled(query: str, window: str) -> str:
    """The query as Grafana sends it when every variable is set to all."""
    for name in VARIABLES:
        query = query.replace(f'"${name}"', '".*"')
    return query.replace(WINDOW, window)


def selector(name: str, matchers: Mapping[str, str]) -> str:
    """`matchers` are label -> value; a value that begins with ~ or ! says how it is compared (=~, !=, !~).
    """
    if not matchers:
        return name
    shown = ", ".join(_matcher(label, value) for label, value in matchers.items())
    return f"{name}{{{shown}}}"


def _matcher(label: str, value: str) -> str:
    for mark, sign in (("!~", "!~"), ("~", "=~"), ("!", "!=")):
        if value.startswith(mark):
            return f'{label}{sign}"{value[len(mark) :]}"'
    return f'{label}="{value}"'


def rate(name: str, by: str = "", window: str = WINDOW, **matchers: str) -> str:
    """Per second, summed by these labels."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({selector(name, matchers)}[{window}]))"


def rate_or_zero(name: str, window: str = WINDOW, **matchers: str) -> str:
    """As rate() over everything; 0 where there is no such series yet."""
    return f"({rate(name, '', window, **matchers)} or vector(0))"


def share(name: str, by: str, window: str = WINDOW, **matchers: str) -> str:
    """Of everything that the family counts, what matches; 0 where nothing ever did."""
    every = rate(name, by, window)
    return f"({rate(name, by, window, **matchers)} or 0 * {every}) / {every}"


def quantile(q: float, name: str, by: str = "", window: str = WINDOW, **matchers: str) -> str:
    """Of a histogram, its buckets merged first: percentiles must never be averaged."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q:g}, sum by ({labels}) (rate({selector(f'{name}_bucket', matchers)}[{window}])))"
