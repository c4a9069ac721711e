"""Formats as Markdown, from their item templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpool.layout import Region
from kvpool.layout.dtypes import ALIASES
from kvpool.layout.formats import At, BufferSpec, Kind, LinearState, Shard
from kvpool.layout.template import Cell, Pad, Repeat, Seq, Skip, Template, item_bytes

COLUMNS = "role", "dtype", "offset", "cell bytes", "axes: steps x stride", "first byte of a cell"


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of state with concrete numbers, what it is and where its format comes from.

    `entries`: entries per item. `item`: page, slot or ring. `tokens`: tokens per entry.
    """

    title: str
    what: str
    source: str
    kind: Kind
    packing: str = "bf16"
    entries: int = 64
    item: str = "page"
    tokens: int = 1
    prefix: str = ""

    def buffers(self) -> list[BufferSpec]:
        """The buffers of one layer."""
        at = At(
            layers=(0,),
            space="kv",
            entries=self.entries,
            shard=Shard(),
            packing=self.packing,
            prefix=self.prefix,
        )
        return list(self.kind.buffers(at))


def page(head: str, formats: Sequence[Format]) -> str:
    """A document: a table of sizes, then a section for each format."""
    lines = [head, *_summary(formats), *(line for each in formats for line in _section(each))]
    return "\n".join(lines)


def written(template: Template) -> str:
    """A template as a Python expression."""
    match template:
        case Cell():
            short = {name: alias for alias, name in ALIASES.items()}
            dtype = short.get(template.dtype, template.dtype)
            return f'Cell("{template.role}", {template.count}, "{dtype}")'
        case Skip():
            return f"Skip({template.nbytes})"
        case Seq():
            return f"Seq({', '.join(map(written, template.parts))})"
        case Repeat():
            return f'Repeat("{template.axis}", {template.size}, {written(template.of)})'
        case Pad():
            return f"Pad({template.multiple}, {written(template.of)})"


def _summary(formats: Sequence[Format]) -> Iterator[str]:
    yield "| format | bytes per entry | bytes per item |"
    yield "|---|---:|---:|"
    for each in formats:
        sizes = [part.item_bytes for part in each.buffers()]
        entry = "" if each.item == "slot" else f"{sum(map(_entry_bytes, each.buffers())):,}"
        items = " + ".join(f"{size:,}" for size in sizes)
        yield f"| [{each.title}](#{_anchor(each.title)}) | {entry} | {items} |"
    yield ""


def _section(each: Format) -> Iterator[str]:
    yield f"## {each.title}\n"
    yield f"{each.what}\n"
    yield f"Source: {each.source}\n"
    slot = each.item == "slot"
    entries = "" if slot else f", {each.item}s of {each.entries} entries"
    tokens = f" of {each.tokens} tokens" if each.tokens > 1 else ""
    packing = "" if each.item == "ring" else f", packing `{each.packing}`"
    yield f"`{each.kind}`{packing}{entries}{tokens}.\n"
    for part in each.buffers():
        yield f"`{part.name}`: `{written(part.item)}`\n"
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|---|---|---:|---:|---|---|"
        regions = part.regions("target")
        yield from map(_row, regions)
        yield ""
        yield _sizes(each, part, sum(region.nbytes for region in regions)) + "\n"


def _row(region: Region) -> str:
    axes = region.axes_by_stride
    steps = ", ".join(f"{axis.name} {axis.size} x {axis.stride:,}" for axis in axes)
    begins = [f"{region.offset}"] * bool(region.offset) + [f"{a.stride} * {a.name}" for a in axes]
    cells = f"{region.offset:,} | {region.width:,} | {steps} | `{' + '.join(begins)}`"
    return f"| {region.role} | {region.dtype} | {cells} |"


def _sizes(each: Format, part: BufferSpec, claimed: int) -> str:
    words = f"A {each.item} is {part.item_bytes:,} bytes"
    if each.item != "slot":
        words += f", {_entry_bytes(part):,} per entry"
    spare = part.item_bytes - claimed
    words += f"; {spare:,} bytes are padding." if spare else "."
    kind = each.kind
    if isinstance(kind, LinearState) and part.name == "temporal":
        shape = [] if kind.state_axis else list(kind.state_shape)
        words += f" Its cells are `{shape}`, the last dim contiguous." if len(shape) > 1 else ""
    return words


def _entry_bytes(part: BufferSpec) -> int:
    """Bytes of an entry, without the padding of the page."""
    inner = part.item.of if isinstance(part.item, Pad) else part.item
    entry = part.regions("target")[0].axis("entry")
    return item_bytes(inner) // (entry.size if entry else 1)


def _anchor(title: str) -> str:
    """The anchor that GitHub derives from a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
