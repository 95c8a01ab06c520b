"""Joins the parts of HTTP messages, and writes lists of numbers for the access log. No I/O.

Compiled builds do it in C (_message_bytes.c, docs/decisions/0028-bytes-in-c.md), and others in
Python (python_message_bytes.py).
"""

from __future__ import annotations

try:
    from gateway.protocol._message_bytes import (
        json_numbers,
        request_head,
        response_lines,
        whole_response,
    )
except ImportError:
    from gateway.protocol.python_message_bytes import (
        json_numbers,
        request_head,
        response_lines,
        whole_response,
    )

__all__ = ["json_numbers", "request_head", "response_lines", "whole_response"]
