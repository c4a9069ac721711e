"""Item templates: the inside of an item (`kvpool.layout.template`)."""

from kvpool.layout.template import (
    Cell as Cell,
    Pad as Pad,
    Repeat as Repeat,
    Seq as Seq,
    Skip as Skip,
    Template as Template,
    alignment as alignment,
    item_bytes as item_bytes,
    item_regions as item_regions,
    prefixed as prefixed,
)
