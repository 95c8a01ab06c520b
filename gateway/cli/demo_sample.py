"""A sample request for `penstock demo --split`: one long prompt, and who prefilled it, who decoded it, how fast."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

_PROMPT = "A penstock is the pipe and gate that feed water to a row of turbines. " * 200


def show(url: str, admin_url: str, model: str, say: Callable[[str], None]) -> None:
    """Ask in a thread of its own, so that the gateway's loop is free to answer; `say` gets the lines to print."""
    threading.Thread(target=_ask_and_tell, args=(url, admin_url, model, say), daemon=True).start()


def _ask_and_tell(url: str, admin_url: str, model: str, say: Callable[[str], None]) -> None:
    try:
        for line in _lines(url, admin_url, model):
            say(line)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        say(f"The sample request failed: {error}")


def _lines(url: str, admin_url: str, model: str) -> list[str]:
    body = {"model": model, "max_tokens": 16, "messages": [{"role": "user", "content": _PROMPT}]}
    headers, _ = _talk(url, "POST", "/v1/chat/completions", json.dumps(body))
    prefill, decode = headers.get("x-penstock-prefill"), headers.get("x-penstock-endpoint")
    if prefill is None:
        return [f"A sample request went to {decode} alone."]
    _, shown = _talk(admin_url, "GET", "/endpoints")
    pair = next(each for each in shown["pairs"] if (each["prefill"], each["decode"]) == (prefill, decode))
    took = "" if pair["handoff_s"] is None else f" {pair['handoff_s'] * 1000:.1f} ms"
    over = f" over {pair['transport']}" if pair["transport"] else ""
    return [f"A sample request: prefilled by {prefill}, decoded by {decode}, handed over in{took}{over}."]


def _talk(url: str, method: str, path: str, body: str | None = None) -> tuple[Any, Any]:
    """Headers and JSON of an answer. Raises OSError, HTTPException or ValueError."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        raw = answer.read()
        if answer.status != 200:
            raise ValueError(f"{answer.status} {raw[:200].decode(errors='replace')}")
        return answer.headers, json.loads(raw)
    finally:
        connection.close()
