"""The JSON schema of a layout's wire form.

python -m kvpool.layout.schema > docs/layout.schema.json
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvpool.layout import VERSION
from kvpool.layout.codec import WireLayout


def schema() -> dict[str, Any]:
    """The schema of `PoolLayout.to_json`, and of `to_msgpack`, whose fields are the same."""
    found = msgspec.json.schema(WireLayout)
    layout = found["$defs"]["PoolLayout"]
    layout["properties"]["version"] = {"const": VERSION}
    layout["required"].append("version")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
