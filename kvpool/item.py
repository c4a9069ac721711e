"""Item templates: the inside of an item (`kvpool.layout.template`)."""

from kvpool.layout.template import Cell as Cell
from kvpool.layout.template import Pad as Pad
from kvpool.layout.template import Repeat as Repeat
from kvpool.layout.template import Seq as Seq
from kvpool.layout.template import Skip as Skip
from kvpool.layout.template import Template as Template
from kvpool.layout.template import alignment as alignment
from kvpool.layout.template import item_bytes as item_bytes
from kvpool.layout.template import item_regions as item_regions
from kvpool.layout.template import prefixed as prefixed
