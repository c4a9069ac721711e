"""The published schema is the code's, and real layouts satisfy it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kvpool.layout.schema import layout_schema
from tests.pools import CLASSES

DOCS = Path(__file__).parents[3] / "docs"
WRITTEN = json.loads((DOCS / "layout.schema.json").read_text())
TYPES = {
    "integer": int,
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def faults(value, rule, path="layout"):
    """Paths at which a value breaks a rule of the schema."""
    if "$ref" in rule:
        yield from faults(value, WRITTEN["$defs"][rule["$ref"].rpartition("/")[2]], path)
        return
    if "anyOf" in rule:
        if all(list(faults(value, each, path)) for each in rule["anyOf"]):
            yield path
        return
    if "enum" in rule or "const" in rule:
        if value not in rule.get("enum", [rule.get("const")]):
            yield path
        return
    kind = TYPES[rule["type"]]
    if type(value) is not kind:
        yield path
    elif kind is list:
        if len(value) > rule["maxItems"]:
            yield path
        for number, each in enumerate(value):
            yield from faults(each, rule["items"], f"{path}[{number}]")
    elif kind is dict:
        fields = rule["properties"]
        assert rule["additionalProperties"] is False
        yield from (f"{path}.{name}" for name in {*value} ^ {*fields} & {*value, *rule["required"]})
        for name in fields.keys() & value.keys():
            yield from faults(value[name], fields[name], f"{path}.{name}")


def in_order(rule):
    """The schema with alternatives in one order: msgspec has changed theirs."""
    if isinstance(rule, dict):
        found = {name: in_order(each) for name, each in rule.items()}
        return found | ({"anyOf": sorted(found["anyOf"], key=str)} if "anyOf" in found else {})
    return [in_order(each) for each in rule] if isinstance(rule, list) else rule


def test_the_published_schema_is_that_of_the_code():
    again = "python -m tests.kvpool.layout.schema > docs/layout.schema.json"
    assert in_order(layout_schema()) == in_order(WRITTEN), f"written by another version: {again}"


def test_the_document_names_every_field():
    text = (DOCS / "layout-format.md").read_text()
    for name, part in WRITTEN["$defs"].items():
        section = text.partition(f"## {name.removeprefix('Pool')}\n")[2].partition("\n## ")[0]
        assert [row.split("`")[1] for row in section.splitlines() if row.startswith("| `")] == [
            *part["properties"]
        ]


@pytest.mark.parametrize("build", CLASSES.values(), ids=list(CLASSES))
def test_layouts_of_pools_satisfy_the_schema(build):
    assert not [*faults(json.loads(build(device="meta").layout.to_json()), WRITTEN)]


def test_what_the_schema_forbids_is_seen():
    held = json.loads(CLASSES["dsv4"](device="meta").layout.to_json())
    held["spaces"][0]["kind"] = "heap"
    held["regions"][0]["axes"][0]["size"] = "4"
    del held["buffers"][0]["base"]
    held["pools"] = 1
    assert {*faults(held, WRITTEN)} == {
        "layout.spaces[0].kind",
        "layout.regions[0].axes[0].size",
        "layout.buffers[0].base",
        "layout.pools",
    }
