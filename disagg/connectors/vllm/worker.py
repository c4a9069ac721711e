"""The connector's half in vLLM's workers: what a scheduler step asks of a rank."""

from __future__ import annotations

from disagg.connectors.rank import Rank
from disagg.connectors.source import FIRST_TOKEN
from disagg.connectors.vllm.layout import BlockGroup, block_table
from disagg.connectors.vllm.scheduler import ReceiveTask, SendTask, Step


class ConnectorWorker:
    """Does what a scheduler step asks of a rank. `groups` are vLLM's cache groups."""

    def __init__(self, rank: Rank, groups: tuple[BlockGroup, ...]) -> None:
        self.rank, self._groups = rank, groups

    def begin(self, step: Step) -> None:
        """Asks for what requests need of prefill."""
        for receive in step.receives:
            self._receive(receive)
        for source in step.declines:
            self.rank.decline(source.room, source.addresses)
        self.rank.turn()

    def save(self, step: Step) -> None:
        """Offers what was computed. Aborts come before: a request that was preempted has a new room
        among the sends.
        """
        for request in step.aborts:
            self.rank.abort(request)
        for send in step.sends:
            self._send(send)
        self.rank.turn()

    def _send(self, send: SendTask) -> None:
        try:
            self.rank.send(
                send.request,
                send.room,
                block_table(self._groups, send.blocks, send.stop),
                range(send.start, send.stop),
                last=send.last,
                aux=None if send.following is None else {FIRST_TOKEN: send.following},
            )
        except Exception as error:  # of one request: the engine serves others
            self.rank.not_sent(send.request, send.room, error)

    def _receive(self, receive: ReceiveTask) -> None:
        try:
            self.rank.receive(
                receive.request,
                receive.source.room,
                block_table(self._groups, receive.blocks, receive.stop),
                start=receive.start,
                peers=receive.source.addresses,
            )
        except Exception as error:  # of one request: the engine serves others
            self.rank.not_received(receive.request, error)
