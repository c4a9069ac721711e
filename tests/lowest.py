"""Prints pip constraints: of every requirement that pyproject.toml names, the lowest version.

python tests/lowest.py cli,metrics,test     # kvpool's own requirements, and those of extras
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
BOUND = re.compile(r"(?P<name>[\w-]+)(?:\[[\w,-]+\])?>=(?P<version>[\w.]+)")


def requirements(extras: Sequence[str]) -> Iterator[str]:
    """Requirements of the build, of kvpool, and of extras."""
    said = tomllib.loads(PYPROJECT.read_text())
    yield from said["build-system"]["requires"]
    yield from said["project"]["dependencies"]
    for extra in extras:
        yield from said["project"]["optional-dependencies"][extra]


def lowest(requirement: str) -> str:
    """`numpy==1.26` of `numpy>=1.26`. Raises ValueError of a requirement without a bound."""
    found = BOUND.match(requirement)
    if found is None:
        raise ValueError(f"{requirement}: no lower bound. Say the oldest release that works.")
    return f"{found['name']}=={found['version']}"


if __name__ == "__main__":
    for requirement in requirements(sys.argv[1].split(",")):
        print(lowest(requirement))
