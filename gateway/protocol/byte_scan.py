"""Searches the bytes of HTTP messages for what every request or chunk of a stream needs. No I/O.

Compiled builds search in C (_byte_scan.c, docs/decisions/0028-bytes-in-c.md), and others in Python
(python_byte_scan.py). Both recognise only frequent forms. For all others, the caller uses a general
parser.
"""

from __future__ import annotations

try:
    from gateway.protocol._byte_scan import body_span, count_events, finish_reason, usage_counts
except ImportError:
    from gateway.protocol.python_byte_scan import (
        body_span,
        count_events,
        finish_reason,
        usage_counts,
    )

__all__ = ["body_span", "count_events", "finish_reason", "usage_counts"]
