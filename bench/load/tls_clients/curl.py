"""Sends requests with curl, half of them streamed, and prints their number by outcome as JSON.

Each curl process sends several requests on one connection.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

REQUESTS = 5
"""Number of requests per curl process."""

END = "\n--- %{http_code}\n"


def run_curl(stream: bool) -> tuple[Counter[str], list[str]]:
    """Send several requests by one process of curl, which reuses its connection.

    Returns the number of requests by outcome, and error messages.
    """
    url = f"{os.environ['URL']}/v1/chat/completions"
    command = ["curl", "-sS", "-N", "--max-time", "60", "--cacert", os.environ["CA"], "-w", END]
    command += [
        "-H",
        "content-type: application/json",
        "-d",
        os.environ["STREAMED" if stream else "WHOLE"],
    ]
    done = subprocess.run(
        [*command, *[url] * REQUESTS], capture_output=True, text=True, check=False
    )
    kind = "streamed" if stream else "whole"
    answers = done.stdout.split("\n--- 200\n")[:-1]
    errors = (
        [done.stderr.strip() or f"curl ended with {done.returncode}"] if done.returncode else []
    )
    counts = Counter({kind: 0, "failed": REQUESTS - len(answers)})
    for answer in answers:
        text = _text(stream, answer)
        counts[kind if text == os.environ["EXPECTED"] else "failed"] += 1
        if text != os.environ["EXPECTED"]:
            errors.append(f"unexpected text: {text}")
    return counts, errors


def _text(stream: bool, answer: str) -> str:
    try:
        if not stream:
            return str(json.loads(answer)["choices"][0]["message"]["content"])
        events = [
            line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")
        ]
        if events.pop() != "[DONE]":
            return "no [DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    except (ValueError, KeyError, IndexError) as error:
        return f"{error!r}"


def main() -> None:
    processes = int(os.environ["COUNT"]) // REQUESTS
    with ThreadPoolExecutor(int(os.environ["THREADS"])) as threads:
        results = list(threads.map(run_curl, (bool(number % 2) for number in range(processes))))
    total: Counter[str] = sum((counts for counts, _ in results), Counter())
    errors = [error for _, messages in results for error in messages][:5]
    print(
        json.dumps(
            {kind: total[kind] for kind in ("whole", "streamed", "failed")} | {"errors": errors}
        )
    )


if __name__ == "__main__":
    main()
