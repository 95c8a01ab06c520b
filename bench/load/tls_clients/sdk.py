"""Sends requests with the openai SDK, half of them streamed, and prints counts by outcome as
JSON.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections import Counter
from typing import Any

import openai

REQUESTS_PER_CLIENT = 10
"""Number of requests before a new client with a new connection is used."""


def send(client: openai.OpenAI, request: dict[str, Any]) -> str:
    answer = client.chat.completions.create(**request)
    if request["stream"]:
        return "".join(event.choices[0].delta.content or "" for event in answer if event.choices)
    return str(answer.choices[0].message.content)


def send_many(count: int, trust: ssl.SSLContext, counts: Counter[str], errors: list[str]) -> None:
    """Send `count` requests one after another; add outcomes to `counts`, errors to `errors`."""
    kinds = [json.loads(os.environ[kind]) for kind in ("WHOLE", "STREAMED")]
    for begin in range(0, count, REQUESTS_PER_CLIENT):
        http = openai.DefaultHttpxClient(verify=trust)
        url = f"{os.environ['URL']}/v1"
        with openai.OpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=60, http_client=http
        ) as client:
            for number in range(begin, min(begin + REQUESTS_PER_CLIENT, count)):
                try:
                    text = send(client, kinds[number % 2])
                except openai.OpenAIError as error:
                    counts["failed"] += 1
                    errors.append(f"{error!r} {error.__cause__!r}")
                    continue
                if text == os.environ["EXPECTED"]:
                    counts[("whole", "streamed")[number % 2]] += 1
                else:
                    counts["failed"] += 1
                    errors.append(f"unexpected text: {text}")


def main() -> None:
    trust = ssl.create_default_context(cafile=os.environ["CA"])
    threads = int(os.environ["THREADS"])
    results: list[tuple[Counter[str], list[str]]] = [(Counter(), []) for _ in range(threads)]
    count = int(os.environ["COUNT"]) // threads
    running = [
        threading.Thread(target=send_many, args=(count, trust, *result)) for result in results
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    total: Counter[str] = sum((counts for counts, _ in results), Counter())
    errors = [error for _, messages in results for error in messages][:5]
    print(
        json.dumps(
            {kind: total[kind] for kind in ("whole", "streamed", "failed")} | {"errors": errors}
        )
    )


if __name__ == "__main__":
    main()
