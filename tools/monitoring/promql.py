"""Builds PromQL queries for dashboards and rules, and finds the metrics and labels in a query.

Queries are not parsed completely: regular expressions find their selectors and label lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

WINDOW = "$__rate_interval"
"""A Grafana variable for the range of a rate(): Grafana replaces it by at least four scrape
intervals.
"""

RANGE = "$__range"
"""A Grafana variable for a duration: Grafana replaces it by the length of the displayed time
range.
"""

VARIABLES = ("job", "namespace", "pool", "model")
"""The variables of the dashboards, named like the labels that they filter."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_RANGE = re.compile(r"\[[^\]]*\]")
_LABEL_LIST = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(?<![\w:])([a-zA-Z_:][\w:]*)(?![\w:])\s*(\{[^}]*\})?(?!\s*\()")
_MATCHER = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)")
_OWN_METRIC = re.compile(r"\b((?:penstock|process)_[\w:]*|penstock:[\w:]+)(?:\{([^}]*)\})?")
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", "vector"})


class Selector(msgspec.Struct, frozen=True):
    """A selector in a PromQL query: the name of a metric, and the names of the labels it filters
    by.
    """

    name: str
    labels: frozenset[str]


def find_selectors(query: str) -> tuple[Selector, ...]:
    bare = _LABEL_LIST.sub(" ", _RANGE.sub("", _STRING.sub('""', query)))
    selectors = (
        (match[1], match[2] or "")
        for match in _SELECTOR.finditer(bare)
        if match[1].lower() not in _WORDS
    )
    return tuple(
        Selector(name, frozenset(_MATCHER.findall(matchers))) for name, matchers in selectors
    )


def grouping_labels(query: str) -> frozenset[str]:
    """Return the labels by which a query groups or joins series, such as those in `by (pool)`.

    The label `le` of histogram buckets is left out.
    """
    return frozenset(label for label in _listed_labels(query) if label != "le")


def _listed_labels(query: str) -> Iterator[str]:
    for match in _LABEL_LIST.finditer(_STRING.sub('""', query)):
        yield from (label.strip() for label in match[2].split(",") if label.strip())


def add_variables(query: str, labels_of: Callable[[str], Collection[str]]) -> str:
    """Return the query with filters for the dashboard's variables, such as pool=~"$pool".

    A selector gets the filters whose label its metric has. `labels_of` returns the labels of a
    metric.
    """

    def limited(match: re.Match[str]) -> str:
        name, matchers = match[1], match[2]
        chosen = [f'{label}=~"${label}"' for label in VARIABLES if label in labels_of(name)]
        return f"{name}{{{', '.join([matchers, *chosen] if matchers else chosen)}}}"

    return _OWN_METRIC.sub(limited, query)


def fill_variables(query: str, window: str) -> str:
    """Return a dashboard's query as Grafana sends it if every variable is set to "All".

    window  duration such as "5m", used for Grafana's rate interval and for the displayed time range
    """
    for name in VARIABLES:
        query = query.replace(f'"${name}"', '".*"')
    return query.replace(WINDOW, window).replace(RANGE, window)


def selector(name: str, matchers: Mapping[str, str]) -> str:
    """Return a PromQL selector, such as `requests_total{code!="200"}`.

    The values of `matchers` can begin with an operator: "!200" excludes the value 200, "~5.." must
    match a regular expression, and "!~5.." must not match it.
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
    """Return the query for a counter's rate per second, summed over the labels that are not in
    `by`.
    """
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({selector(name, matchers)}[{window}]))"


def rate_or_zero(name: str, window: str = WINDOW, **matchers: str) -> str:
    """Return the query for a counter's total rate per second; it gives 0 if no series exists."""
    return f"({rate(name, '', window, **matchers)} or vector(0))"


def share(name: str, by: str, window: str = WINDOW, **matchers: str) -> str:
    """Return the query for the share of a counter's increase that comes from matching series.

    For example share("requests_total", "pool", code="~5..") queries the fraction of requests that
    failed, by pool. The fraction is 0 if no series matches.
    """
    total = rate(name, by, window)
    return f"({rate(name, by, window, **matchers)} or 0 * {total}) / {total}"


def quantile(q: float, name: str, by: str = "", window: str = WINDOW, **matchers: str) -> str:
    """Return the query for a quantile of a histogram, over all series or grouped by labels.

    q       the quantile, such as 0.99
    by      labels to group by, such as "pool"; without any, all series are merged
    window  duration over which observations count, such as "5m"
    """
    labels = f"le, {by}" if by else "le"
    buckets = selector(f"{name}_bucket", matchers)
    return f"histogram_quantile({q:g}, sum by ({labels}) (rate({buckets}[{window}])))"
