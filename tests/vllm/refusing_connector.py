"""An external KV connector that stores nothing, and refuses to be emptied while a file is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class RefusingConnector(KVConnectorBase_V1):
    """Takes part in everything and does nothing; `refuse` in its extra config names the file."""

    def reset_cache(self) -> bool:
        """Whether the cache is empty: not while the file is there."""
        return not Path(self._kv_transfer_config.kv_connector_extra_config["refuse"]).exists()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Know of no token."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Say nothing to the workers."""
        return KVConnectorMetadata()
