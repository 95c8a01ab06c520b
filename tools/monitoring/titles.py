"""Titles of the generated dashboard panels, by metric family; a test requires one for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "penstock_cost_usd_total": "Dollars of engine time per second",
        "penstock_idle_cost_usd_total": "Dollars of idle engine time per second",
        "penstock_overflow_total": "Requests served by a smaller model",
        "penstock_ttft_prediction_error_ratio": "Error of the expected time to first token",
        "penstock_pick_regret_seconds": "Delay against the fastest endpoint",
        "penstock_hedges_total": "Hedged requests by second endpoint",
        "penstock_resumes_total": "Interrupted streams by cause and result",
        "penstock_client_disconnects_total": "Clients that disconnected early, by stage",
        "penstock_itl_seconds": "Time between chunks of a stream",
        "penstock_e2e_seconds": "Duration of requests by model",
        "penstock_queue_seconds": "Time in the queue by pool",
        "penstock_shed_seconds": "Time until a refusal",
        "penstock_admission_price": "Admission price by pool",
        "penstock_admission_session_share": "KV cache open to running sessions, by pool",
        "penstock_endpoint_cache_exact": "Prefix caches known exactly by KV events",
        "penstock_kv_event_messages_total": "Messages of KV events by kind",
        "penstock_kv_event_audits_total": "Answers compared with the exact index, by result",
        "penstock_prompts_learned_total": "Prompts whose tokens were learned, by result",
        "penstock_endpoint_slowness_ratio": "Slow endpoints: time relative to their peers",
        "penstock_ejections_total": "Ejections by endpoint and reason",
        "penstock_endpoint_state": "Health state by endpoint",
        "penstock_endpoint_running": "Running requests reported by engines",
        "penstock_endpoint_waiting": "Queued requests reported by engines",
        "penstock_endpoint_prefill_backlog_tokens": "Prompt tokens waiting for prefill, "
        "by endpoint",
        "penstock_endpoint_context_tokens": "Context tokens being decoded, by endpoint",
        "penstock_endpoint_scrape_age_seconds": "Age of the load reported by engines",
        "penstock_completion_tokens_total": "Output tokens by model",
        "penstock_batch_requests_total": "Requests of batches by outcome",
        "penstock_batch_preemptions_total": "Stopped requests of batches by result",
        "penstock_batch_kept_tokens_total": "Tokens kept of stopped requests of batches",
        "penstock_batch_backlog": "Requests of batches without a result",
        "penstock_batch_running": "Running requests of batches",
        "penstock_split_live": "Split requests in progress",
        "penstock_bytes_out_total": "Bytes sent to clients",
        "penstock_open_streams": "Open streams",
        "penstock_connections": "Client connections",
        "penstock_connections_refused_total": "Refused client connections by limit",
        "penstock_tls_handshake_failures_total": "Failed TLS handshakes by listener",
        "penstock_tls_certificate_not_after_timestamp_seconds": "TLS certificate expiry "
        "by listener",
        "penstock_body_bytes": "Memory of request bodies",
        "penstock_tasks": "Event loop tasks",
        "penstock_log_lines_dropped_total": "Dropped access log lines",
        "penstock_build_info": "Program version",
        "penstock_trace_spans_total": "Trace spans by export result",
        "penstock_config_last_reload_successful": "Last configuration reload succeeded",
        "penstock_config_applied_timestamp_seconds": "Time of the last configuration change",
        "penstock_config_swap_seconds": "Duration of configuration changes",
        "penstock_shadow_picks_total": "Shadow policies: decisions by result",
        "penstock_shadow_ttft_seconds_total": "Shadow policies: difference in time to first token",
        "penstock_shadow_cached_tokens_total": "Shadow policies: "
        "difference in cached prompt tokens",
        "penstock_shadow_cost_seconds_total": "Shadow policies: CPU time",
        "penstock_canary_requests_total": "Canary: requests by arm and SLO outcome",
        "penstock_canary_ttft_seconds": "Canary: time to first token by arm",
        "penstock_shared_peers": "Other gateways connected",
        "penstock_shared_messages_total": "Messages between gateways by kind",
        "penstock_shared_dropped_total": "Dropped messages between gateways by reason",
        "penstock_blind_picks_total": "Prefix decisions before the shared state was loaded",
    }
)
