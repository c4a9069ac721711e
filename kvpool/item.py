"""Item templates (`kvpool.layout.template`)."""

from kvpool.layout.template import (
    Cell,
    Pad,
    Repeat,
    Seq,
    Skip,
    Template,
    alignment,
    item_bytes,
    item_regions,
    prefixed,
)

__all__ = ["Cell", "Pad", "Repeat", "Seq", "Skip", "Template"]
__all__ += ["alignment", "item_bytes", "item_regions", "prefixed"]
