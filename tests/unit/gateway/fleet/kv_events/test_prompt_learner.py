"""Tests of when and for which prompts the gateway asks an engine for the token ids.

With the token ids, KV events (reports of cached blocks) can be matched to prompts.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec

from gateway.fleet.kv_events.event_verification import EndpointEvents
from gateway.fleet.kv_events.exact_prefixes import ExactPrefixes
from gateway.fleet.kv_events.prompt_learner import PromptLearner, Tokenizer
from gateway.fleet.kv_events.tokenization import COMPLETIONS_PATH, UnreadPrompt
from gateway.metrics.catalogue import Metrics
from policies.prefix.fingerprint import Fingerprinter
from tests.duration_limits import within

SLOTS = {"known": 0, "new": 1}
FINGERPRINTER = Fingerprinter(b"sixteen characters")


def prompt_of(model: str, number: int) -> UnreadPrompt:
    text = f"{model} {number} ".encode() * 200
    fingerprint = FINGERPRINTER.fingerprint(b"", text)
    ids = msgspec.Raw(msgspec.json.encode(list(range(number, number + 64))))
    return UnreadPrompt(model, COMPLETIONS_PATH, {"prompt": ids}, b"", fingerprint)


async def test_a_model_whose_block_size_is_unknown_holds_up_no_other_model() -> None:
    exact = ExactPrefixes(1 << 20)
    for slot in SLOTS.values():
        source = exact.new_source(has_replay=False)
        source.block_tokens = 0 if slot else 16
        exact.endpoints[slot] = EndpointEvents([source])

    def resolve(model: str) -> Tokenizer | None:
        if model not in SLOTS:
            return None
        load = SimpleNamespace(slot=SLOTS[model], in_flight=0)
        live: Any = SimpleNamespace(load=load, endpoint=SimpleNamespace(salt_member=""))
        return Tokenizer([live], model)

    prompts = [prompt_of(model, at) for at, model in enumerate(["new", "known", "gone", "known"])]
    for prompt in prompts:
        exact.note(prompt)
    learner = PromptLearner(exact, resolve, Metrics().prompts_learned_total)
    learner.start()

    async def until_one_is_left() -> None:
        while len(exact.unread) > 1:
            await asyncio.sleep(0.001)

    await within(5.0, until_one_is_left())
    assert [prompt.model for prompt in exact.unread] == ["new"]
    assert all(exact.prompts.has(prompts[index].fingerprint) for index in (1, 3))
    exact.endpoints[1].sources[0].block_tokens = 32
    while exact.unread:
        await asyncio.sleep(0.001)
    await learner.stop()
    assert exact.prompts.has(prompts[0].fingerprint)
