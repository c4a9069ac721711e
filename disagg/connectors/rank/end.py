"""How a rank ends: what other engines read of it is read to its end, for a bounded time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from disagg.errors import EndpointClosed
from disagg.runtime.endpoint import Endpoint


def end(endpoints: Sequence[Endpoint[Any]], seconds: float, log: logging.Logger) -> None:
    """Closes endpoints of an engine that makes no step any more: what it has sent may be read for
    `seconds` in all, what waits for it fails at once, on both sides by name. May be called again.
    """
    deadline = time.monotonic() + seconds
    try:
        with suppress(EndpointClosed):
            for endpoint in endpoints:  # first: none takes a room while another is waited for
                endpoint.drain(stopped=True)
            for endpoint in endpoints:
                try:
                    endpoint.drain(timeout=max(0.0, deadline - time.monotonic()))
                except TimeoutError as error:
                    log.warning("closed before all was read (drain_seconds %g): %s", seconds, error)
    finally:
        for endpoint in endpoints:
            endpoint.close()
