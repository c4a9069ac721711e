"""What the caches of a request have written of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvpool.allocation.allocator import Request
from kvpool.pools.states import UnionPool


@dataclass
class Progress:
    """What the caches of each owner (target, draft) have written of one request.

    `written`: tokens, where fewer than the request has; `unfinished`: owners of whose last forward
    some layers were not written.
    """

    written: dict[str, int] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)

    def truncate(self, pool: UnionPool, tokens: int) -> None:
        """Forgets what was written after `tokens` tokens. Raises ValueError if they end inside a
        window that a compressor of `pool` has closed: it keeps the window's gates no more.
        """
        for space in pool.layout.spaces if self.written.get(pool.owner, 0) > tokens else ():
            step, end = space.window_step, self.written[pool.owner]
            if space.window and step > 1 and tokens % step and tokens // step < end // step:
                raise ValueError(
                    f"space {space.name}: {tokens} tokens end inside a window of {step} that was "
                    f"compressed. Keep {tokens // step * step} tokens."
                )
        self.written = {owner: min(count, tokens) for owner, count in self.written.items()}


PROGRESS: WeakKeyDictionary[Request, Progress] = WeakKeyDictionary()


def copy_progress(request: Request, child: Request, tokens: int) -> None:
    """Called when a request is forked."""
    if progress := PROGRESS.get(request):
        if progress.unfinished:
            raise ValueError("the last forward over this request did not finish. Free it.")
        written = {owner: min(count, tokens) for owner, count in progress.written.items()}
        PROGRESS[child] = Progress(written)
