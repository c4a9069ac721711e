"""Floors of every kind."""

from __future__ import annotations

from tests.disagg.store.floors import (
    HERE,
    floor as floor,
    floor_servers as floor_servers,
    floor_url as floor_url,
    other_floor as other_floor,
    process_variables as process_variables,
    space as space,
)

collect_ignore = [] if HERE else ["test_mooncake_floor.py", "test_serve.py"]
