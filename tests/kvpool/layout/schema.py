"""The JSON schema of a layout's wire form.

python -m tests.kvpool.layout.schema > docs/layout.schema.json
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvpool.layout import VERSION
from kvpool.layout.codec import WireLayout


def layout_schema() -> dict[str, Any]:
    """The schema of `PoolLayout.to_json`, and of `to_msgpack`, whose fields are the same."""
    schema = msgspec.json.schema(WireLayout)
    layout = schema["$defs"]["PoolLayout"]
    layout["properties"]["version"] = {"const": VERSION}
    layout["required"].append("version")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


if __name__ == "__main__":
    print(json.dumps(layout_schema(), indent=2))
