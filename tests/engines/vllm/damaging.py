"""Connectors that damage what they have received: controls of `kvpool conform`."""

from __future__ import annotations

from typing import Any

import torch

from disagg.connectors.steps import ReceiveTask
from disagg.connectors.vllm.connector import KvpoolConnector


class _Damaging(KvpoolConnector):
    """Calls `damage(blocks)` once a request is received, before the engine is told."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.views = kv_caches
        worker, asked = self._worker, {}
        receive, received = worker._receive, worker.rank._received

        def saw_receive(told: ReceiveTask) -> None:
            asked[told.source.room] = told
            receive(told)

        def saw_received(room: str | int, failure: Any) -> None:
            if failure is None and room in asked:
                self.damage(asked[room].blocks)
            received(room, failure)

        worker._receive, worker.rank._received = saw_receive, saw_received

    def group(self, *, states: bool) -> tuple[int, Any]:
        """The first group of recurrent states, or of attention, and its number."""
        groups = enumerate(self._kv_cache_config.transfer_groups)
        recurrent = "MambaSpec"
        return next(
            (number, group)
            for number, group in groups
            if (type(group.kv_cache_spec).__name__ == recurrent) == states
        )

    def damage(self, blocks: Any) -> None:
        raise NotImplementedError


class DroppedLayer(_Damaging):
    """One layer's K and V are lost."""

    def damage(self, blocks: Any) -> None:
        number, group = self.group(states=False)
        view = self.views[group.layer_names[-1]]
        view[[block for block in blocks[number] if block]] = 0


class FlippedBit(_Damaging):
    """One bit of one element of a recurrent state is another."""

    def damage(self, blocks: Any) -> None:
        number, group = self.group(states=True)
        page = self.views[group.layer_names[0]][blocks[number][-1]]
        element = page[(0,) * (page.ndim - 1)][:1]
        element.view(torch.uint8)[0] ^= 1
