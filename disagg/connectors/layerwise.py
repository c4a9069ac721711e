"""Which layers of a forward pass can be offered, where an engine tells of them one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

LayerId = tuple[str, int]
"""Owner and number of a layer, as layouts have them."""


class Computed:
    """Layers of the pass that runs now. `layers` are those that have state here, by the engine's
    name; several names may be of one layer, which is whole once the engine has told of all.
    """

    def __init__(self, layers: Mapping[str, LayerId]) -> None:
        self._layers = layers
        self._left: dict[LayerId, set[str]] = {}
        self.begun = False
        """Whether the engine has told of any layer in this pass."""

    @property
    def ended(self) -> bool:
        """Whether every layer was given."""
        return not self._left

    def of(self, name: str) -> Iterator[LayerId]:
        """The engine has computed `name`: its layer, if it is whole by that."""
        if name not in self._layers:  # it has no state of its own
            return
        if not self.begun:
            self.begun = True
            for part, layer in self._layers.items():
                self._left.setdefault(layer, set()).add(part)
        layer = self._layers[name]
        left = self._left.get(layer)
        if left is not None:
            left.discard(name)
            if not left:
                del self._left[layer]
                yield layer

    def rest(self) -> Iterator[LayerId]:
        """The pass has ended: the layers of which the engine has not told."""
        for layer in list(self._left):
            del self._left[layer]
            yield layer
        self.begun = False
