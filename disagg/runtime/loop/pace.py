"""How often a side that is read lets its engine make progress: as often as that is of use, and less
often where the host has no time for it.
"""

from __future__ import annotations


class Pace:
    """Pauses of `least` seconds, that double up to `most` while the host is late in ending them:
    dozens of endpoints on a few cores would otherwise keep one another from their turns.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, max(least, most)
        self.seconds = least

    def woke(self, asked: float, taken: float) -> None:
        """A pause of `asked` seconds has taken so many."""
        if taken > 2 * asked:
            self.seconds = min(self._most, 2 * self.seconds)
        else:
            self.seconds = max(self._least, self.seconds / 2)
