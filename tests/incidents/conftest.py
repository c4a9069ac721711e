"""Floors of every kind, for the failures of stores."""

from __future__ import annotations

from tests.disagg.store.floors import (
    floor_servers as floor_servers,
    floor_url as floor_url,
    process_variables as process_variables,
    space as space,
)
