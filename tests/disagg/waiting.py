"""Waiting for what an endpoint's thread does."""

from __future__ import annotations

from contextlib import suppress

from disagg import UnknownRoom


def until(endpoint, condition, seconds=20):
    """Waits until a condition holds; a room that is not known yet is one to wait for."""

    def holds():
        with suppress(UnknownRoom):
            return condition()
        return False

    assert endpoint.driver.wait(holds, seconds)
