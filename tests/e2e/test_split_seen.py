"""What an operator sees of split requests: the access line, /endpoints, and the metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.e2e.split_house import SENTENCE, SplitHouse, split_house


async def lines_of(file: Path, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(5):
        while True:
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) >= count:
                return [json.loads(line) for line in lines]
            await asyncio.sleep(0.01)


async def test_the_access_line_and_the_endpoints_page_tell_who_prefilled_who_decoded_and_how_long_it_took(
    tmp_path: Path,
) -> None:
    file = tmp_path / "access.log"
    async with split_house("vllm_nixl", groups=(1, 1), log=str(file)) as house:
        await house.right({"prompt": SENTENCE * 30, "max_tokens": 8, "stream": True})
        await house.right({"prompt": "short", "max_tokens": 8})
        (prefill,), (decode,) = house.prefill, house.decode
        names = [member.url.removeprefix("http://") for member in (prefill, decode)]
        split, whole = await lines_of(file, 2)
        assert [split["prefill"], split["endpoint"]] == names
        assert (split["split_reason"], split["dialect"], split["transport"]) == ("long", "vllm_nixl", "inproc")
        stamps = [split[f"{stamp}_us"] for stamp in ("picked", "sent", "prefilled", "handed_over", "first_token")]
        assert stamps == sorted(stamps)
        assert abs(split["handoff_us"] - (split["first_token_us"] - split["prefilled_us"])) <= 1
        assert (whole["split_reason"], whole["endpoint"]) == ("short", names[1])
        assert not {"prefill", "dialect", "prefilled_us"} & whole.keys()
        async with house.http.get(f"{house.app.admin_url}/endpoints") as answer:
            shown = await answer.json()
        assert [each["role"] for each in shown["endpoints"]] == ["prefill", "decode"]
        (group,), (pair,) = shown["splits"], shown["pairs"]
        assert (group["dialect"], group["prefill"], group["decode"]) == ("vllm_nixl", names[:1], names[1:])
        assert (pair["served"], pair["failed"], pair["transport"]) == (1, 0, "inproc")
        assert pair["handoff_s"] > 0
        assert house.metric("penstock_split_handoff_seconds_count") == 1


async def test_the_live_view_tells_how_many_bytes_of_kv_a_pair_moved() -> None:
    quick = {"scrape": {"interval": "50ms"}, "health": {"interval": "50ms", "timeout": "5s"}}
    async with split_house("vllm_nixl", groups=(1, 1), **quick) as house:
        await house.right({"prompt": SENTENCE * 30, "max_tokens": 8})
        async with asyncio.timeout(5):
            while not (flow := await live_flow(house))["pairs"][0]["kv_bytes_per_s"]:
                await asyncio.sleep(0.05)
    (pair,) = flow["pairs"]
    assert flow["kv_bytes_per_s"] == {"inproc": pair["kv_bytes_per_s"]}


async def live_flow(house: SplitHouse) -> dict[str, Any]:
    async with house.http.get(f"{house.app.admin_url}/live") as answer:
        told: dict[str, Any] = (await answer.json())["flow"]
        return told
