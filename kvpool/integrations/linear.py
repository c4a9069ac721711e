"""A layer's linear-attention state over a pool, lent to a model that may change it in place.

Decoding one token, models shift the convolution's state and update the temporal state inside the
tensors that they were given, without a call. Lent tensors are written back when the model has
dropped them.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

import torch

from kvpool.integrations.batch import Batch
from kvpool.layout.formats import At, LinearState


class LinearStates:
    """One linear-attention state of a layer; `name` is what the cache counts its tokens by."""

    def __init__(self, batch: Batch, layer: int, name: str, kind: LinearState, at: At) -> None:
        self.batch, self.layer, self.name = batch, layer, name
        self.kind, self.at = kind, at
        self._lent: dict[str, torch.Tensor] = {}
        self._views: dict[str, Any] = {}  # weak, of the tensors that the model has
        self._lent_after = 0  # tokens
        self._unshifted = torch.empty(0)  # the first tap as it was lent

    @property
    def columns(self) -> int:
        return self.batch.written[self.layer, self.name]

    def conv(self) -> torch.Tensor | None:
        """The last inputs `[B, channel, tap]`; None before the first token.

        transformers keeps as many taps as the kernel has. No output depends on the first
        one; its value never equals the second one, which shows whether the model has shifted
        them.
        """
        if not self.columns or not self.kind.taps:
            return None
        self.check_returned()
        first, taps = self._taps()
        if not self.kind.conv_inputs:
            return taps
        self._lent, self._views, self._unshifted = {}, {}, first
        return self._lend("conv", torch.cat([first, taps], dim=-1))

    def temporal(self) -> torch.Tensor | None:
        """The temporal state `[B, head, ...]`; None before the first token."""
        if not self.columns or not self.kind.heads:
            return None
        return self._lend("temporal", self._read()[1])

    def update_conv(self, conv: torch.Tensor) -> torch.Tensor:
        """Writes the last of the inputs `[B, channel, T]`; returns all after the previous state.
        Where the model gives the new state itself, writes and returns it.
        """
        width = conv.shape[-1] if self.kind.conv_inputs else self.kind.taps
        self._check("conv", conv, (self.kind.channels(self.at.shard), width))
        if not self.kind.conv_inputs:
            self.batch.advance(self.layer, self.name, self._new_tokens())
            self._write(conv, None)
            return conv
        if self.columns:
            before = self._taps()
        else:
            missing = max(0, self.kind.taps + 1 - conv.shape[-1])
            before = [conv.new_zeros(*conv.shape[:2], missing)]
        self._lent.pop("conv", None)
        self.batch.advance(self.layer, self.name, conv.shape[-1])
        full = torch.cat([*before, conv], dim=-1)
        self._write(full, None)
        return full

    def update_temporal(self, state: torch.Tensor) -> torch.Tensor:
        """Writes the temporal state `[B, head, ...]`, and taps that were shifted in place."""
        heads = self.at.shard.of(self.kind.heads)[1] if self.kind.heads else 0
        self._check("temporal", state, (heads, *self.kind.state_shape))
        if not self.kind.taps:
            self.batch.advance(self.layer, self.name, self._new_tokens())
        self._settle(state)
        return state

    def check_returned(self) -> None:
        """Raises RuntimeError where a state was changed in place and is not written yet."""
        if self._shifted():
            raise RuntimeError(
                f"{self.batch.pool.owner} layer {self.layer} {self.name}: a forward changed the "
                "state in place and something still holds its tensor. Either it did not finish "
                "(free the requests), or let go of the tensor after each forward."
            )

    def _lend(self, name: str, state: torch.Tensor) -> torch.Tensor:
        view = state.view_as(state)
        self._lent[name], self._views[name] = state, ref(view, self._returned)
        self._lent_after = self.columns
        return view

    def _returned(self, _: Any) -> None:
        """Called when the model has let go of a lent tensor."""
        if any(view() is not None for view in self._views.values()):
            return
        try:
            self._settle()
        except Exception as error:  # no caller can catch it
            self.batch.fail(error)

    def _settle(self, temporal: torch.Tensor | None = None) -> None:
        """Writes what was changed in place, and `temporal` in place of the lent one."""
        shifted, lent = self._shifted(), self._lent
        self._lent = {}
        if shifted:
            self.batch.advance(self.layer, self.name, 1)
        if temporal is None and self.columns > self._lent_after:
            temporal = lent.get("temporal")
        self._write(lent["conv"] if shifted else None, temporal)

    def _shifted(self) -> bool:
        conv = self._lent.get("conv")
        return conv is not None and not torch.equal(conv[..., :1], self._unshifted)

    def _new_tokens(self) -> int:
        """Tokens of this forward, for a state that does not show how many it took."""
        batch = self.batch
        tokens = batch.columns - self.columns or batch.query_length
        if not tokens:
            raise ValueError(
                f"{batch.pool.owner} layer {self.layer} {self.name}: the model did not say "
                "how many tokens it was given. Give it no 4D mask of your own, or call "
                "get_mask_sizes(tokens, layer) before it."
            )
        return tokens

    def _taps(self) -> list[torch.Tensor]:
        """A first tap that differs from the second one, and the stored taps."""
        conv, _ = self._read()
        return [(conv[..., :1] == 0).to(conv.dtype), conv]

    def _read(self) -> Any:
        """Both states of each row; zeros if no token of the row is written yet."""
        load = partial(self.batch.pool.get_linear_state, self.layer, part=self.at.prefix[:-1])
        return self.batch.read(self._slots(), load)

    def _write(self, conv: torch.Tensor | None, temporal: torch.Tensor | None) -> None:
        if conv is None and temporal is None:
            return
        batch, slots = self.batch, self._slots()
        rows = [row for row, tokens in enumerate(batch.padding.tokens(self.columns)) if tokens]
        if not all(batch.requests[row].num_tokens for row in rows):
            return  # a tensor outlived its request, whose slot may be another's now
        if len(rows) < len(batch.requests):
            slots = slots[rows]
            conv, temporal = (x if x is None else x[rows] for x in (conv, temporal))
        if conv is not None:
            conv = conv[..., -self.kind.taps :]
        batch.pool.set_linear_state(self.layer, slots, conv, temporal, part=self.at.prefix[:-1])

    def _slots(self) -> torch.Tensor:
        """The slot of each row `[B]`; PADDING if no token of the row is written yet."""
        locations = self.batch.locations(self.layer, self.at.prefix + self.kind.inputs[0])
        return locations[:, self.columns - 1]

    def _check(self, name: str, state: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Raises ValueError where the kind has no such state, or the pool not such a one."""
        pool, layer = self.batch.pool, self.layer
        roles = [r for r in self.kind.inputs if r.partition(".")[0] == name]
        if not roles:
            raise ValueError(
                f"{pool.owner} layer {layer} {self.name}: the model has a {name} state, the pool "
                f"holds {', '.join(self.kind.inputs)}. Build the pool for this model."
            )
        region = pool.layout.region_by_key[pool.owner, layer, self.at.prefix + roles[0]]
        role, widen = self.at.prefix + name, name == "temporal"
        self.batch.check(layer, role, state, shape, region.dtype, widen=widen)
