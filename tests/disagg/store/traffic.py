"""Requests as users make them, and what the state of their tokens is: it depends on the tenant and
on all tokens before, so that state of another prompt, tenant, position or head differs.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

VOCABULARY = 32_000
TENANTS, SYSTEMS, LIVE, RESTING = 16, 8, 200, 2_000
"""Tenants, of whom the first have the most requests; system prompts, which all of them use;
conversations that go on, and those that may be taken up again.
"""
MOST_TOKENS = 256
_POWERS = np.cumprod(np.full(2 * MOST_TOKENS, 0x9E3779B97F4A7C15, np.uint64))
_FACTORS = np.random.default_rng(31).integers(1 << 62, size=(8, 8), dtype=np.uint64) | np.uint64(1)
"""Odd, by plane (a role of a layer) and head."""

Tokens = np.ndarray


@dataclass
class Conversation:
    """`tokens` are all of its turns until now."""

    tenant: int
    tokens: Tokens


@dataclass(frozen=True)
class Turn:
    """A request: what is asked, with all that came before, and what will be answered."""

    tenant: int
    prompt: Tokens
    answer: Tokens

    @property
    def salt(self) -> str:
        return f"tenant {self.tenant}"

    @property
    def tokens(self) -> Tokens:
        return np.concatenate([self.prompt, self.answer])


@dataclass
class Traffic:
    """Turns without end, by seed: conversations that grow, questions behind a system prompt, the
    same again, and conversations of long ago.
    """

    seed: int
    live: list[Conversation] = field(default_factory=list)
    resting: deque[Conversation] = field(default_factory=lambda: deque(maxlen=RESTING))
    recent: deque[Turn] = field(default_factory=lambda: deque(maxlen=LIVE))

    def __post_init__(self) -> None:
        self._pick, self._random = random.Random(self.seed), np.random.default_rng(self.seed)
        self._systems = [self._some(40, 100) for _ in range(SYSTEMS)]
        self.live += [self._begun() for _ in range(LIVE)]

    def turn(self) -> Turn:
        kind = self._pick.random()
        if kind < 0.1 and self.recent:
            return self._pick.choice(self.recent)
        if kind < 0.3:
            turn = self._turn(self._begun())
        else:
            place = self._pick.randrange(LIVE)
            if kind < 0.33 and self.resting:
                self.live[place] = self._pick.choice(self.resting)
            turn = self._turn(self.live[place])
            self.live[place] = self._after(turn)
        self.recent.append(turn)
        return turn

    def _turn(self, before: Conversation) -> Turn:
        prompt = np.concatenate([before.tokens, self._some(4, 12)])
        return Turn(before.tenant, prompt, self._some(4, 12))

    def _after(self, turn: Turn) -> Conversation:
        """A conversation goes on, or another begins in its place."""
        grown = Conversation(turn.tenant, turn.tokens)
        if grown.tokens.size < MOST_TOKENS - 24:
            return grown
        self.resting.append(
            Conversation(turn.tenant, turn.prompt[: self._pick.randrange(100, 200)])
        )
        return self._begun()

    def _begun(self) -> Conversation:
        tenant = min(int(self._pick.expovariate(0.4)), TENANTS - 1)
        return Conversation(tenant, self._pick.choice(self._systems))

    def _some(self, least: int, most: int) -> Tokens:
        return self._random.integers(0, VOCABULARY, self._pick.randint(least, most), dtype=np.int32)


def state_of(tenant: int, tokens: Tokens) -> np.ndarray:
    """A number for each token, of which the state of that token is made."""
    parts = tokens.astype(np.uint64) + np.uint64((tenant + 1) << 32)
    return np.cumsum(parts * _POWERS[: tokens.size], dtype=np.uint64)


class Planes:
    """The state in a pool of K and V whose rows have eight bytes: `heads` are those it has."""

    def __init__(self, pool, heads: range) -> None:
        views = [pool.view(role, layer) for layer in pool.layers for role in ("k", "v")]
        self._planes = [v.view(torch.int64).squeeze(-1).numpy().view(np.uint64) for v in views]
        self._factors = _FACTORS[: len(views), heads.start : heads.stop]
        self._page = pool.page_size

    def put(self, places: np.ndarray, state: np.ndarray) -> None:
        """Writes tokens' state to flat locations."""
        pages, entries = np.divmod(places, self._page)
        for plane, factors in zip(self._planes, self._factors):
            plane[pages, entries] = state[:, None] * factors

    def wrong(self, places: np.ndarray, state: np.ndarray) -> int:
        """How many rows are not what they should be."""
        pages, entries = np.divmod(places, self._page)
        return sum(
            int((plane[pages, entries] != state[:, None] * factors).sum())
            for plane, factors in zip(self._planes, self._factors)
        )
