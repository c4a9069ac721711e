"""How long to sleep before Mooncake is asked for the end of a read: its call that waits keeps a
core busy until then, which its own threads need.
"""

from __future__ import annotations

SLEPT = 0.8
"""Part of the shortest known time of a read that is slept. The rest is waited for in the call."""
LEAST_SECONDS = 0.0002
"""Shorter sleeps are not worth their wake-up."""


class Pace:
    """The fastest rate of earlier reads from one peer, by their order of magnitude in bytes and
    runs: small reads and those of small runs are slower.
    """

    def __init__(self) -> None:
        self._rates: dict[tuple[int, int], float] = {}

    def sleep_seconds(self, nbytes: int, runs: int) -> float:
        """How long no read of so many bytes and runs has ended yet; 0 where none is known."""
        rate = self._rates.get((nbytes.bit_length(), runs.bit_length()))
        seconds = SLEPT * nbytes / rate if rate else 0.0
        return seconds if seconds >= LEAST_SECONDS else 0.0

    def took(self, nbytes: int, runs: int, seconds: float) -> None:
        """Notes a read that has ended."""
        kind = nbytes.bit_length(), runs.bit_length()
        self._rates[kind] = max(self._rates.get(kind, 0.0), nbytes / max(seconds, 1e-9))
