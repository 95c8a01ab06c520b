"""A connector (plug-in) for vLLM that keeps the KV blocks of each ended request for a while.

So does a connector that saves KV to a slower memory. This one saves nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

KEEP_S = 0.3


@dataclass
class EndedRequests(KVConnectorMetadata):
    ids: list[str] = field(default_factory=list)


class DelayedSaves(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._ended: list[str] = []
        self._pending: set[str] = set()
        self._free_at: dict[str, float] = {}

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._ended.append(request.request_id)
        self._pending.add(request.request_id)
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> EndedRequests:
        ended, self._ended = self._ended, []
        return EndedRequests(ended)

    def update_connector_output(self, connector_output: Any) -> None:
        self._pending.difference_update(connector_output.finished_sending or ())

    def has_pending_push_work(self) -> bool:
        return bool(self._pending)

    # ---- worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EndedRequests)
        self._free_at |= dict.fromkeys(metadata.ids, time.monotonic() + KEEP_S)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        now = time.monotonic()
        free = {request for request, at in self._free_at.items() if at <= now}
        for request in free:
            del self._free_at[request]
        return free, None
