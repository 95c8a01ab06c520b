"""Tests of how split requests appear in the access log, on /endpoints and /live, and in the
metrics.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.duration_limits import PATIENCE_S
from tests.e2e.split_fleet import SENTENCE, SplitFleet, split_fleet


async def lines_of(file: Path, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) >= count:
                return [json.loads(line) for line in lines]
            await asyncio.sleep(0.01)


async def test_the_access_line_and_the_endpoints_page_show_both_endpoints_and_the_stage_times(
    tmp_path: Path,
) -> None:
    file = tmp_path / "access.log"
    async with split_fleet("vllm_nixl", groups=(1, 1), log=str(file)) as fleet:
        await fleet.assert_right_answer({"prompt": SENTENCE * 30, "max_tokens": 8, "stream": True})
        await fleet.assert_right_answer({"prompt": "short", "max_tokens": 8})
        (prefill,), (decode,) = fleet.prefill, fleet.decode
        names = [member.url.removeprefix("http://") for member in (prefill, decode)]
        split, whole = await lines_of(file, 2)
        assert [split["prefill"], split["endpoint"]] == names
        assert (split["split_reason"], split["dialect"], split["transport"]) == (
            "long",
            "vllm_nixl",
            "inproc",
        )
        stamps = [
            split[f"{stamp}_us"]
            for stamp in ("picked", "sent", "prefilled", "decode_sent", "first_token")
        ]
        assert stamps == sorted(stamps)
        assert abs(split["handoff_us"] - (split["first_token_us"] - split["prefilled_us"])) <= 1
        assert (whole["split_reason"], whole["endpoint"]) == ("short", names[1])
        assert not {"prefill", "dialect", "prefilled_us"} & whole.keys()
        async with fleet.http.get(f"{fleet.app.admin_url}/endpoints") as answer:
            shown = await answer.json()
        assert [endpoint["role"] for endpoint in shown["endpoints"]] == ["prefill", "decode"]
        (group,), (pair,) = shown["splits"], shown["pairs"]
        assert (group["dialect"], group["prefill"], group["decode"]) == (
            "vllm_nixl",
            names[:1],
            names[1:],
        )
        assert (pair["served"], pair["failed"], pair["transport"]) == (1, 0, "inproc")
        assert pair["handoff_s"] > 0
        assert fleet.metric("penstock_split_handoff_seconds_count") == 1


async def test_the_live_view_shows_the_kv_bandwidth_of_a_pair() -> None:
    quick = {"scrape": {"interval": "50ms"}, "health": {"interval": "50ms", "timeout": "5s"}}
    async with split_fleet("vllm_nixl", groups=(1, 1), **quick) as fleet:
        await fleet.assert_right_answer({"prompt": SENTENCE * 30, "max_tokens": 8})
        async with asyncio.timeout(PATIENCE_S):
            while not (flow := await live_flow(fleet))["pairs"][0]["kv_bytes_per_s"]:
                await asyncio.sleep(0.05)
    (pair,) = flow["pairs"]
    assert flow["kv_bytes_per_s"] == {"inproc": pair["kv_bytes_per_s"]}


async def live_flow(fleet: SplitFleet) -> dict[str, Any]:
    async with fleet.http.get(f"{fleet.app.admin_url}/live") as answer:
        flow: dict[str, Any] = (await answer.json())["flow"]
        return flow
