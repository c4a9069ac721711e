"""SGLang's KV receiver: one request of a decode rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from disagg.connectors.sglang.bootstrap import join
from disagg.connectors.sglang.sender import raise_failure
from disagg.connectors.source import FIRST_TOKEN


class KvpoolReceiver(CommonKVReceiver):
    """Asks for a request's state, and reads it."""

    failure_exception = raise_failure

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        mgr.forget_lost(bootstrap_addr)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        **more: Any,
    ) -> None:
        """Asks for the state behind `decode_prefix_len` tokens, to be read to these pages."""
        mgr, room, start = self.kv_mgr, self.bootstrap_room, decode_prefix_len or 0
        if mgr.check_status(room) == KVPoll.Failed:
            return
        first = start // mgr.kv_args.page_size
        try:
            address = mgr.layout.address(self._tokens(), kv_indices, state_indices, first)
            mgr.known[self.bootstrap_addr].add(peers := self._peers())
            aux = (FIRST_TOKEN,)
            mgr.rank.receive(str(room), room, address, start=start, peers=peers, aux=aux)
        except Exception as error:  # of one request: the engine serves others
            mgr.fail(room, error)
            return
        mgr.reading[room] = aux_index
        mgr.update_status(room, KVPoll.Transferring)

    def poll(self) -> Any:
        """SGLang's state of the room."""
        self.kv_mgr.turn()
        return super().poll()

    def _register_kv_args(self) -> bool:
        return True  # our handshake does that

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Prefill is told that no decode reads the room (any more)."""
        mgr, room = self.kv_mgr, self.bootstrap_room
        if room in mgr.reading:
            mgr.rank.abort(str(room))
        elif not force_arm:
            with suppress(ValueError):
                mgr.rank.drop(room, self._peers())

    def _tokens(self) -> int:
        """How many tokens prefill is to have computed: SGLang passes on pages only, which would
        hold a longer or shorter prompt too.
        """
        queue = self.kv_mgr.queue.queue
        request = next((entry.req for entry in queue if entry.kv_receiver is self), None)
        if request is None:
            raise ValueError(
                "SGLang's queue has no request of this room, so its length is unknown."
            )
        # what decode has computed already is handed over with the prompt
        again = getattr(request, "pd_rebootstrap_in_progress", False)
        return len(request.origin_input_ids) + (len(request.output_ids) if again else 0)

    def _peers(self) -> tuple[str, ...]:
        """Endpoint addresses of prefill's ranks."""
        return tuple(join(info["rank_ip"], info["rank_port"]) for info in self.bootstrap_infos)
