"""SGLang's KV sender and KV receiver: one request of a rank of prefill, or of decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender, KVTransferError

from disagg.connectors.sglang.bootstrap import join
from disagg.connectors.sglang.metadata import read_row
from disagg.connectors.source import FIRST_TOKEN, traceparent_in


def raise_failure(request: Any) -> None:
    """Raises why the room of a sender or receiver has failed, as SGLang has it, and forgets it."""
    request.conclude_state = KVPoll.Failed
    request.clear()
    with request.kv_mgr.failure_lock:
        why = request.kv_mgr.failure_records.pop(request.bootstrap_room, None)
    reason = why or "it has failed on another rank."
    raise KVTransferError(request.bootstrap_room, reason, is_from_another_rank=why is None)


def tokens_of(request: Any) -> int:
    """How many tokens prefill is to have computed; the pages alone do not show it."""
    # what decode has computed already is handed over with the prompt
    again = getattr(request, "pd_rebootstrap_in_progress", False)
    return len(request.origin_input_ids) + (len(request.output_ids) if again else 0)


def traceparent_of(request: Any) -> str | None:
    """Of the span that SGLang has of a request, where it records any (`--enable-trace`)."""
    traced = request.time_stats.trace_ctx
    if not traced.tracing_enable:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, traced.root_span_context)
    return traceparent_in(headers)


class KvpoolSender(CommonKVSender):
    """Offers the chunks of a request. It is Bootstrapping until a decode has asked for its room."""

    failure_exception = raise_failure
    conclude_state: Any

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **more: Any):
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **more)
        self._pages: list[int] = []
        self._tokens = self._offered = 0
        if not mgr.is_dummy_cp_rank and mgr.check_status(bootstrap_room) != KVPoll.Failed:
            self.init_time = time.time()
            with mgr.lock:
                try:
                    mgr.rank.expect(str(bootstrap_room), bootstrap_room)
                    mgr.sending.add(bootstrap_room)
                except ValueError as error:  # a client chooses the number
                    mgr.fail(bootstrap_room, error)

    def send(
        self,
        kv_indices: Any,
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
        **more: Any,
    ) -> None:
        """Offers the next pages, `num_kv_tokens` tokens of them."""
        room, mgr = self.bootstrap_room, self.kv_mgr
        if self.conclude_state is not None or mgr.check_status(room) == KVPoll.Failed:
            return
        kv_indices, _, last, skip = self._prepare_send_indices(kv_indices, state_indices)
        if skip:  # a CP rank whose state another one sends
            return
        self._pages.extend(int(page) for page in kv_indices)
        self._tokens += num_kv_tokens or 0
        start, stop = self._offered, self._tokens
        if not last:  # windows come with the last chunk, whose number of pages is known
            least = (self.num_kv_indices - 1) * mgr.kv_args.page_size + 1
            stop = max(start, min(stop, least - mgr.layout.held_back))
        self._offered = stop
        after, self._early_send_wait_event = getattr(self, "_early_send_wait_event", None), None
        if start == stop and not last:
            return
        with mgr.lock:
            try:
                table = mgr.layout.address(stop, self._pages, state_indices)
                aux = None
                if last and mgr.tells:
                    aux = read_row(mgr.metadata, self.aux_index, drafts=mgr.drafts)
                tokens = range(start, stop)
                mgr.rank.send(str(room), room, table, tokens, last=last, aux=aux, after=after)
                mgr.update_status(room, KVPoll.Transferring)
            except Exception as error:  # of one request: the engine serves others
                mgr.rank.not_sent(str(room), room, error)
        self._record_transfer_indices(kv_indices, state_indices)

    def poll(self) -> Any:
        return self._polled(self.kv_mgr.check_status)

    def poll_pp_consensus(self) -> Any:
        return self._polled(self.kv_mgr.check_status_pp_consensus)

    def clear(self) -> None:
        """SGLang is done with the request, maybe as it has failed on another rank."""
        self._give_up()
        super().clear()

    def abort(self) -> None:
        """SGLang gives the request up; its pages are free from now on."""
        self._give_up()
        super().abort()

    def _give_up(self) -> None:
        with self.kv_mgr.lock:
            if self.bootstrap_room in self.kv_mgr.sending:
                self.kv_mgr.sending.remove(self.bootstrap_room)
                self.kv_mgr.rank.abort(str(self.bootstrap_room))

    def _polled(self, check: Callable[[int], Any]) -> Any:
        if self.conclude_state is not None:
            return self.conclude_state
        self.kv_mgr.turn()
        status = check(self.bootstrap_room)
        if status == KVPoll.Bootstrapping:
            status = self._check_bootstrap_timeout() or status
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        return status


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
        first, aux = start // mgr.kv_args.page_size, (FIRST_TOKEN,)
        try:
            request = self._request()
            table = mgr.layout.address(tokens_of(request), kv_indices, state_indices, first)
            mgr.known[self.bootstrap_addr].add(peers := self._peers())
            mgr.rank.receive(
                str(room),
                room,
                table,
                start=start,
                peers=peers,
                aux=aux,
                traceparent=traceparent_of(request),
            )
            mgr.reading[room] = aux_index
            mgr.update_status(room, KVPoll.Transferring)
        except Exception as error:  # of one request: the engine serves others
            mgr.fail(room, error)

    def poll(self) -> Any:
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

    def _request(self) -> Any:
        """SGLang's, of this room."""
        for entry in self.kv_mgr.queue.queue:
            if entry.kv_receiver is self:
                return entry.req
        raise ValueError("SGLang's queue has no request of this room, so its length is unknown.")

    def _peers(self) -> tuple[str, ...]:
        """Endpoint addresses of prefill's ranks."""
        return tuple(join(info["rank_ip"], info["rank_port"]) for info in self.bootstrap_infos)
