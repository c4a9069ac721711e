"""What a section is given, and how it tries one thing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from disagg.cli.accept.report import FAILED, NOT_HERE, PASSED, Row
from kvpool.device import Device
from kvpool.testing.case import CheckFailure, Inapplicable


@dataclass(frozen=True)
class Scope:
    """The device, whether little is to be tried of everything, and what shows what runs now."""

    device: Device
    quick: bool
    section: str = ""
    show: Callable[[str], object] = lambda _: None

    @property
    def small(self) -> bool:
        """Whether sizes are minimal and nothing is timed: if `quick`, and on emulated devices."""
        return self.quick or self.device.emulated

    def tell(self, what: str) -> None:
        """Shows what runs now."""
        self.show(f"{self.section}: {what}")

    def tried(self, name: str, work: Callable[[], str]) -> Row:
        """The row of one thing that is tried. `work` returns what it found, or raises Inapplicable
        if it cannot be tried here; anything else that it raises is a failure.
        """
        self.tell(name)
        began = time.monotonic()
        try:
            state, sentence = PASSED, work()
        except Inapplicable as why:
            state, sentence = NOT_HERE, str(why)
        except CheckFailure as failure:
            state, sentence = FAILED, str(failure)
        except Exception as error:  # the others are tried all the same
            state, sentence = FAILED, f"{type(error).__name__}: {error}"
        return Row(name, state, " ".join(sentence.split()), time.monotonic() - began)
