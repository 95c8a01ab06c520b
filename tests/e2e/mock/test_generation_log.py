"""Tests of the mock engine's log of generated tokens, which also counts tokens no client received.

The requests are sent over real sockets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from mockgpu.generation_log import GeneratedSequence
from mockgpu.mock_tokenizer import expected_text, render_chat, token_bytes, token_ids
from tests.e2e.mock_group import CHAT, SPEC, MockGroup, mock_group, slow_group

pytestmark = pytest.mark.filterwarnings(
    "ignore:Overriding the .event_loop_policy. fixture is deprecated"
)


def logged(path: Path) -> list[GeneratedSequence]:
    return [msgspec.json.decode(line, type=GeneratedSequence) for line in path.open("rb")]


async def test_each_sequence_has_a_line_with_its_prompt_and_tokens(tmp_path: Path) -> None:
    log = tmp_path / "log"
    spec = msgspec.structs.replace(SPEC, generation_log=str(log))
    async with mock_group(spec) as group:
        await group.stream(CHAT | {"max_tokens": 5})
        await group.answer("/v1/chat/completions", CHAT | {"max_tokens": 4, "n": 2})
        answer = expected_text(CHAT, 5)
        rest = {"model": "demo-8b", "prompt": [*token_ids(render_chat(CHAT) + answer.encode())]}
        await group.answer("/v1/completions", rest | {"max_tokens": 3})
        made = await group.metric("vllm:generation_tokens_total")
    lines = logged(log)
    prompt = token_ids(render_chat(CHAT))
    assert [line.generated for line in lines] == [5, 4, 4, 3]
    assert [line.prompt for line in lines[:3]] == [prompt] * 3
    assert lines[3].prompt == [*prompt, *token_ids(token_bytes(answer))]
    assert sum(line.generated for line in lines) == made
    assert all(line.began_s <= line.ended_s for line in lines)


async def test_an_aborted_sequence_has_the_tokens_that_were_generated(tmp_path: Path) -> None:
    log = tmp_path / "log"
    spec = msgspec.structs.replace(slow_group(), generation_log=str(log))
    async with mock_group(spec) as group:
        body = CHAT | {"max_tokens": 2000, "stream": True}
        async with group.post("/v1/chat/completions", body) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await group.until("vllm:num_requests_running", 0)
        made = await group.metric("vllm:generation_tokens_total")
    (line,) = logged(log)
    assert line.generated == made
    assert 1 <= line.generated < 2000


async def test_several_engines_append_to_one_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    spec = msgspec.structs.replace(SPEC, generation_log=str(log))
    for tokens in (2, 3):
        async with mock_group(spec) as group:
            await ask(group, tokens)
    assert [line.generated for line in logged(log)] == [2, 3]


async def ask(group: MockGroup, tokens: int) -> None:
    await group.answer("/v1/chat/completions", CHAT | {"max_tokens": tokens})
