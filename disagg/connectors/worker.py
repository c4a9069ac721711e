"""A connector's half in the workers of an engine: a step's requests, their blocks and layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from disagg.connectors.blocks import BlockGroup, block_table
from disagg.connectors.rank.rank import LayerId, Rank
from disagg.connectors.rank.results import Results
from disagg.connectors.source import FIRST_TOKEN
from disagg.connectors.steps import ReceiveTask, SendTask, Step
from disagg.connectors.tensors import clear_items

if TYPE_CHECKING:
    from disagg.connectors.store.steps import StoreRead
    from disagg.connectors.store.worker import StoreWorker

IDLE_SECONDS = 0.005
"""How long a step in which the engine computes nothing waits for a room to end. The engine's next
step would ask again at once, with its processes busy in the meantime on cores that others need.
"""


@dataclass(eq=False)
class ConnectorWorker:
    """Does what a scheduler step asks of a rank. `groups` are the engine's cache groups, `layers`
    all that have state here by the engine's names. `cleared`: by group, tensors `[block, ...]`
    whose blocks may keep nothing of their past, if the engine leaves that to the code that fills
    them. `store`: of an engine that has one.
    """

    rank: Rank
    groups: tuple[BlockGroup, ...]
    layers: Mapping[str, LayerId]
    cleared: Sequence[Sequence[torch.Tensor]]
    store: StoreWorker | None = None
    _idle: bool = False
    """Whether the engine computes nothing in this step."""
    _begun: bool = False
    """Whether the engine has told of any layer in this forward pass."""
    _left: dict[str, LayerId] = field(default_factory=dict)
    """Not yet reported, by name. Several may be of one layer."""
    _loading: dict[str, ReceiveTask] = field(default_factory=dict)
    """By request, what is waited for layer by layer in this step."""
    _invalid: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.store is not None:
            self.store.stats = self.rank.stats

    def settle(self, step: Step) -> None:
        """Before the engine clears or fills any block in a step."""
        if self.store is not None and step.store is not None:
            self.store.settle(step.store)

    def begin(self, step: Step) -> None:
        """Asks for what requests need of prefill."""
        self.settle(step)  # where the engine has not told of the step before
        self._abort(step)
        self._idle = step.idle
        # with a drafter, vLLM asks for results before it lets `save` offer what has finished
        for send in step.sends:
            self.rank.expect(send.request, send.room)
        for receive in step.receives:
            self._receive(receive)
        for source in step.declines:
            self.rank.decline(source.room, source.addresses)
        if self.store is not None and step.store is not None:
            self.store.begin(step.store, self._clear)
        self.rank.turn()

    def wait_layer(self, name: str) -> None:
        """Waits for a layer of the requests that this step begins."""
        if name in self.layers:
            for receive in self._loading.values():
                self.rank.wait_layer(receive.source.room, self.layers[name])

    def save_layer(self, name: str, step: Step) -> None:
        """Offers a layer, once all that is computed under its number was computed."""
        if name in self.layers and not self._begun:
            self._begun, self._left = True, dict(self.layers)
        layer = self._left.pop(name, None)
        if layer is not None and layer not in self._left.values():
            self._offer(step, layer)
            self.rank.turn()

    def save(self, step: Step) -> None:
        """Offers what was computed, and waits until all has come that this step has used."""
        if not self._begun:
            self._offer(step)
        while self._left:
            layer = next(iter(self._left.values()))
            self._left = {name: left for name, left in self._left.items() if left != layer}
            self._offer(step, layer)
        self._begun = False
        for receive in self._loading.values():
            self.rank.wait(receive.source.room)
        if self.store is not None and step.store is not None:
            self.store.save(step.store)
        self.rank.turn()

    def results(self, finished: Collection[str]) -> Results:
        """What has ended, where the engine has `finished` these requests. Those that this step has
        begun wait for no result: blocks of those that have failed are `invalid_blocks`.
        """
        if self._idle and not (self.store and self.store.reading):
            self.rank.wait_for_end(IDLE_SECONDS)
        results = self.rank.results(finished)
        for request in results.failed & self._loading.keys():
            receive = self._loading[request]
            first = receive.start // self.groups[0].tokens
            self._invalid.update(receive.blocks[0][first:])
        results.received -= self._loading.keys()
        results.failed -= self._loading.keys()
        self._loading.clear()
        if self.store is not None:
            stored = self.store.results()
            results.received |= stored.received
            results.failed |= stored.failed
        return results

    def close(self) -> None:
        self.rank.close()
        if self.store is not None:
            self.store.close()

    def invalid_blocks(self) -> set[int]:
        """Blocks, since the last call, whose state did not come."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def _offer(self, step: Step, layer: LayerId | None = None) -> None:
        """Offers a layer, or all."""
        self._abort(step)
        for send in list(step.sends):
            try:
                self._send(send, layer)
            except Exception as error:  # of one request: the engine serves others
                step.sends.remove(send)
                self.rank.not_sent(send.request, send.room, error)

    def _abort(self, step: Step) -> None:
        """Before all else of a step: a preempted request has a new room in `sends`."""
        while step.aborts:
            self.rank.abort(step.aborts.pop())

    def _send(self, send: SendTask, layer: LayerId | None) -> None:
        last = send.last and not self._left
        aux = {FIRST_TOKEN: send.following} if last and send.following is not None else None
        table = block_table(self.groups, send.blocks, send.stop)
        tokens, room = range(send.start, send.stop), send.room
        self.rank.send(send.request, room, table, tokens, last=last, layer=layer, aux=aux)

    def _receive(self, receive: ReceiveTask) -> None:
        source, start = receive.source, receive.start
        try:
            self._clear(receive)
            table = block_table(self.groups, receive.blocks, receive.stop)
            self.rank.receive(
                receive.request,
                source.room,
                table,
                start=start,
                peers=source.addresses,
                traceparent=receive.traceparent,
            )
        except Exception as error:  # of one request: the engine serves others
            self.rank.not_received(receive.request, error)
        if receive.waits:
            self._loading[receive.request] = receive

    def _clear(self, receive: ReceiveTask | StoreRead) -> None:
        """Sets blocks to 0 that will not be filled to their end. Kernels multiply what they hold
        there by 0, and what another group has left there may be no number.
        """
        for group, ids, tensors in zip(self.groups, receive.blocks, self.cleared):
            if group.state is None:
                clear_items(tensors, group.unfilled(ids, receive.start, receive.stop))
