"""Joins the parts of HTTP messages: heads of requests to engines, and responses. No I/O.

Compiled builds do it in C (_message_bytes.c, docs/decisions/0028-bytes-in-c.md), and others in
Python (python_message_bytes.py).
"""

from __future__ import annotations

try:
    from gateway.protocol._message_bytes import request_head, response_lines, whole_response
except ImportError:
    from gateway.protocol.python_message_bytes import request_head, response_lines, whole_response

__all__ = ["request_head", "response_lines", "whole_response"]
