"""The published schema is the code's.

python -m tests.kvpool.layout.test_schema > docs/layout.schema.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kvpool.layout import VERSION
from kvpool.layout.codec import WireLayout

DOCS = Path(__file__).parents[3] / "docs"
WRITTEN = json.loads((DOCS / "layout.schema.json").read_text())


def layout_schema() -> dict[str, Any]:
    """The schema of `PoolLayout.to_json`, and of `to_msgpack`, whose fields are the same."""
    schema = msgspec.json.schema(WireLayout)
    layout = schema["$defs"]["PoolLayout"]
    layout["properties"]["version"] = {"const": VERSION}
    layout["required"].append("version")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def in_order(rule):
    """The schema with alternatives in one order: msgspec has changed theirs."""
    if isinstance(rule, dict):
        found = {name: in_order(each) for name, each in rule.items()}
        return found | ({"anyOf": sorted(found["anyOf"], key=str)} if "anyOf" in found else {})
    return [in_order(each) for each in rule] if isinstance(rule, list) else rule


def test_the_published_schema_is_that_of_the_code():
    again = "python -m tests.kvpool.layout.test_schema > docs/layout.schema.json"
    assert in_order(layout_schema()) == in_order(WRITTEN), f"written by another version: {again}"


def test_the_document_names_every_field():
    text = (DOCS / "layout-format.md").read_text()
    for name, part in WRITTEN["$defs"].items():
        section = text.partition(f"## {name.removeprefix('Pool')}\n")[2].partition("\n## ")[0]
        assert [row.split("`")[1] for row in section.splitlines() if row.startswith("| `")] == [
            *part["properties"]
        ]


if __name__ == "__main__":
    print(json.dumps(layout_schema(), indent=2))
