"""docs/protocol.md lists every message as its type has it; docs/architecture.md every phase."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from msgspec import inspect

from disagg.protocol import messages, trace_context
from disagg.protocol.status import TRANSITIONS, Phase, RoomEvent
from disagg.protocol.versions import PROTOCOL
from kvpool.layout import text

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "protocol.md").read_text()
SECTION = re.compile(r"^### (\w+) \(`(\w+)`, ([^)]+)\)\n(.*?)(?=^##|\Z)", re.S | re.M)
FIELD = re.compile(r"^- `(\w+)` \((.+?)\)(?::|$)", re.M)
TYPES = dict(
    re.findall(r"^- (\w+): (.+)$", TEXT.split("\n## Messages\n")[1].split("\n### ")[0], re.M)
)
"""Types that have a short name on the page."""
KINDS = inspect.type_info(messages.Message).types
SENT = {
    who: {kind.cls for kind in inspect.type_info(to).types}
    for who, to in (("decode", messages.ToPrefill), ("prefill", messages.ToDecode))
}


def words(kind):
    """A field's type and bounds, as the document gives them."""
    name = type(kind).__name__.removesuffix("Type").lower()
    match kind:
        case inspect.FloatType(le=float(most)) if most == sys.float_info.max:
            return "finite float"
        case inspect.IntType(ge=int(low), le=high) | inspect.FloatType(ge=float(low), le=high):
            return f"{name} from {low:,} to {high:,}"
        case inspect.StrType(pattern=trace_context.PATTERN):
            return "traceparent"
        case inspect.StrType(max_length=int(most), pattern=pattern):
            printable = {None: "text", text.PRINTABLE: "printable text"}
            what = "name" if pattern == text.PRINTABLE and kind.min_length else printable[pattern]
            return f"{what} of at most {most:,} characters"
        case inspect.ListType(item_type=item):
            return f"list of {words(item)}"
        case inspect.DictType(key_type=key, value_type=value):
            return f"map of {words(key)} to {words(value)}"
        case inspect.StructType(cls=struct):
            return struct.__name__
        case inspect.UnionType(types=types):
            return " or ".join(map(words, types))
    return name


def in_full(kind):
    """A field's type on the page, without short names."""
    return re.sub(r"\w+", lambda word: TYPES.get(word[0], word[0]), kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.cls.__name__)
def test_a_message_is_documented_field_by_field(kind):
    by_name = {name: rest for name, *rest in SECTION.findall(TEXT)}
    tag, sender, body = by_name[kind.cls.__name__]
    senders = [who for who, classes in SENT.items() if kind.cls in classes]
    assert (tag, sender) == (kind.tag, f"from {' and '.join(senders)}")
    fields = [(name, in_full(kind)) for name, kind in FIELD.findall(body)]
    assert fields == [(field.name, words(field.type)) for field in kind.fields]


def test_the_document_has_no_other_message_and_this_protocol_number():
    assert {name for name, *_ in SECTION.findall(TEXT)} == {kind.cls.__name__ for kind in KINDS}
    assert f"`protocol` is {PROTOCOL}." in TEXT


def test_the_document_has_the_rule_of_names():
    spans = [
        f"U+{low:04X}" + (f"-U+{high:04X}" if high > low else "") for low, high in text.UNPRINTABLE
    ]
    assert f"\n{', '.join(spans)}\n" in TEXT


@pytest.mark.parametrize("side", TRANSITIONS)
def test_the_documents_have_the_transition_table_and_what_its_events_mean(side):
    table = {
        (phase.name, event.name, after.name) for (phase, event), after in TRANSITIONS[side].items()
    }
    rows = re.search(rf"^(\| {side} \|.*\n)\|-.*\n((?:\|.*\n)+)", TEXT, re.M)
    (_, *events), *cells = (
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in "".join(rows.groups()).split("\n")[:-1]
    )
    phases = {phase for before, _, after in table for phase in (before, after)}
    assert [phase for phase, *_ in cells] == [phase.name for phase in Phase if phase.name in phases]
    assert table == {
        (phase, event, after)
        for phase, *states in cells
        for event, after in zip(events, states)
        if after
    }
    assert all(f"- {event}: {RoomEvent[event].value}\n" in TEXT for event in events)
    diagrams = (DOCS / "architecture.md").read_text().split("stateDiagram-v2")[1:]
    drawn = re.findall(
        r"^  ([A-Z]+) --> ([A-Z]+): (\w+)$", diagrams[side == "prefill"].split("```")[0], re.M
    )
    assert sorted(drawn) == sorted((a, b, event) for a, event, b in table if a != b)
