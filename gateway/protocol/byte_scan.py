"""Searches HTTP messages for what every request or chunk needs: bodies, events, counts. No I/O.

Compiled builds search in C (_byte_scan.c, docs/decisions/0028-bytes-in-c.md), and others in Python
(python_byte_scan.py). Both recognise only frequent forms. For all others, the caller uses a general
parser.
"""

from __future__ import annotations

try:
    from gateway.protocol._byte_scan import (
        around_value,
        body_span,
        count_events,
        finish_reason,
        has_error_name,
        usage_counts,
        whole_body,
    )

    IS_C_FORM = True
except ImportError:
    from gateway.protocol.python_byte_scan import (
        around_value,
        body_span,
        count_events,
        finish_reason,
        has_error_name,
        usage_counts,
        whole_body,
    )

    IS_C_FORM = False  # finish_reason() and usage_counts() always leave the search to the caller

__all__ = [
    "IS_C_FORM",
    "around_value",
    "body_span",
    "count_events",
    "finish_reason",
    "has_error_name",
    "usage_counts",
    "whole_body",
]
