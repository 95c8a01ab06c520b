"""Tests that predictions of engine latency are updated only if a policy reads them.

If a reload needs predictions, they start from the requests in progress.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from policies import load_ledger
from policies.routing_types import Request
from tests.unit.gateway.reload.running import running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

PLAIN, PRICED = "policy: prefix_aware", "policy: priced"
CAPPED = "pools:\n  chat:\n"


async def test_a_plain_policy_keeps_counters_and_predicts_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        loads = [live.load for live in harness.app.gateway.endpoints.all()]
        for number in range(4):
            assert await harness.ask(f"{number} words") == "ok"
        assert not any(load.is_modelled or load.in_flight for load in loads)
        assert all(load.timeline.prefill_steps == 0 for load in loads)
        async with harness.http.get(harness.app.admin_url + "/metrics") as page:
            assert "penstock_ttft_prediction_error_ratio_count 0" in await page.text()


async def test_after_a_reload_to_priced_the_latency_model_starts_from_its_prior_and_the_reservations(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        table = harness.app.gateway.endpoints
        load = table.all()[0].load
        waits = load_ledger.reserve(load, Request("1", "demo-8b", "t", 8000, 100), 0, monotonic())
        decodes = load_ledger.reserve(load, Request("2", "demo-8b", "t", 3000, 100), 0, monotonic())
        decodes.on_first_token(monotonic())
        assert (waits.predicted_ttft_s, waits.predicted_tpot_s) == (None, None)
        assert (await harness.put(harness.text().replace(PLAIN, PRICED)))[0] == 200
        belief, timeline = load.belief, load.timeline
        assert [
            belief.speeds.prefill.factor,
            belief.speeds.step.factor,
            *belief.layers.factors,
        ] == [
            1.0,
            1.0,
            1.0,
        ]
        assert (list(timeline.queue), timeline.batch) == ([waits], 1)
        assert load.prefill_done_at > monotonic()
        assert waits.predicted_ttft_s is not None
        for number in range(4):
            assert await harness.ask(f"{number} words") == "ok"
        waits.finish(monotonic(), 10)
        decodes.finish(monotonic(), 10)
        assert (await harness.put(harness.text()))[0] == 200
        assert not load.is_modelled
        assert (load.in_flight, load.decoding, load.prefill_tokens, load.decode_tokens) == (
            0,
            0,
            0,
            0,
        )


async def test_an_admission_that_reads_latency_models_has_them_updated_under_a_plain_policy(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        text = harness.text().replace(CAPPED, CAPPED + "    admission: early_rejection\n")
        assert (await harness.put(text))[0] == 200
        assert all(live.load.is_modelled for live in harness.app.gateway.endpoints.all())


async def test_a_pool_that_serves_as_a_fallback_has_latency_predictions(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        url = harness.members[1].url
        models = "  - {name: demo-8b, pool: chat, overflow: [{model: small}]}\n  - {name: small, pool: small}\n"
        text = harness.text(0).replace("  - {name: demo-8b, pool: chat}\n", models)
        text = text.replace(
            "pools:\n", f"pools:\n  small:\n    endpoints: [{{name: s, url: {url}}}]\n"
        )
        status, reply = await harness.put(text)
        assert status == 200, reply
        pools = {
            live.endpoint.pool: live.load.is_modelled
            for live in harness.app.gateway.endpoints.all()
            if not live.is_leaving
        }
        assert pools == {"chat": False, "small": True}


async def test_a_pool_whose_endpoints_hand_kv_to_each_other_has_latency_predictions(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        split = "{name: demo-8b, pool: chat, split: {dialect: penstock}}"
        text = harness.text().replace("{name: demo-8b, pool: chat}", split)
        status, reply = await harness.put(text)
        assert status == 200, reply
        assert all(live.load.is_modelled for live in harness.app.gateway.endpoints.all())
