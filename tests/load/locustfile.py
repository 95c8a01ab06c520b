"""Simulated users for locust, which stream chat completions and also report times per token.

    make load                                                          # with mock engines
    locust -f tests/load/locustfile.py --host http://127.0.0.1:8080    # with a web page

The rows are:

POST chat   the time of the complete response
TTFT chat   the time to the first event with generated content
TPOT chat   the time per token after it

The prompts are those of `penstock bench` (planner/bench/workloads.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from locust import HttpUser, between, events, task
from locust.env import Environment

from planner.bench.answer_timeline import AnswerTimeline
from planner.bench.workloads import WorkloadSession, shapes

SHAPES = ("chat", "shared-prefix")


@events.init.add_listener
def make_sessions(environment: Environment, **_: Any) -> None:
    """Create the generators of prompts, one per kind of traffic, which all simulated users
    share.
    """
    sessions = {name: shapes()[name].sessions(0) for name in SHAPES}
    environment.sessions = sessions  # type: ignore[attr-defined]


class StreamingUser(HttpUser):
    """A user that repeatedly sends a request, reads the stream to its end, and pauses."""

    abstract = True
    wait_time = between(0.1, 0.5)
    shape: str

    def on_start(self) -> None:
        with self.client.get("/v1/models", catch_response=True) as answer:
            self.model = answer.json()["data"][0]["id"]

    @task
    def ask(self) -> None:
        sessions: Iterator[WorkloadSession] = self.environment.sessions[self.shape]
        session = next(sessions)
        turn = session.turns[0]
        body = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": session.system or "Answer briefly."},
                {"role": "user", "content": turn.content},
            ],
            "max_tokens": turn.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timeline, started_s = AnswerTimeline(), time.perf_counter()
        request = self.client.post(
            "/v1/chat/completions",
            json=body,
            name=self.shape,
            stream=True,
            catch_response=True,
            timeout=120,
        )
        with request as answer:
            if answer.status_code != 200:
                answer.failure(f"status {answer.status_code}")
                return
            for piece in answer.iter_content(chunk_size=None):
                timeline.feed(piece, time.perf_counter())
            answer.request_meta["response_time"] = (time.perf_counter() - started_s) * 1e3
            if timeline.error or not timeline.done:
                answer.failure(timeline.error or "the stream ended without [DONE]")
        self._report(timeline, started_s)

    def _report(self, timeline: AnswerTimeline, started_s: float) -> None:
        if timeline.first_s is None or timeline.last_s is None:
            return
        self._event("TTFT", timeline.first_s - started_s, timeline.tokens)
        if timeline.tokens > 1:
            self._event(
                "TPOT",
                (timeline.last_s - timeline.first_s) / (timeline.tokens - 1),
                timeline.tokens,
            )

    def _event(self, kind: str, seconds: float, tokens: int) -> None:
        # Report a measurement to locust; the response length is the number of tokens.
        self.environment.events.request.fire(
            request_type=kind,
            name=self.shape,
            response_time=seconds * 1e3,
            response_length=tokens,
            exception=None,
            context={},
        )


class ChatUser(StreamingUser):
    """A simulated user with a conversation. All conversations begin with one short system prompt."""

    shape = "chat"
    weight = 3


class SharedPrefixUser(StreamingUser):
    """A simulated user that asks about one of 150 long prompts with shared beginnings."""

    shape = "shared-prefix"
    weight = 1
