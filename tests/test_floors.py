"""A folder imports folders of lower floors only, and only what its floor may use."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_MODULES = 14
FLOORS = {  # lowest first; folders and modules of one floor do not import one another
    "kvpool": (
        {"extras", "process", "version"},
        {"_native", "layout"},
        {"device"},
        {"pools"},
        {"prefix"},
        {"allocation"},
        {"models", "render"},
        {"integrations", "testing", "cli", "item", "describe"},
        {"__main__", "kvpool"},
    ),
    "disagg": (
        {"errors", "log"},
        {"host"},
        {"plan"},
        {"digest", "engines"},
        {"protocol", "portable"},
        {"tracing"},
        {"runtime", "snapshot", "store", "timeline"},
        {"contract", "series"},
        {"connectors", "exporter"},
        {"testing"},
        {"cli"},
        {"disagg"},
    ),
}
BANNED = {  # by imported package: where
    "torch": (
        "kvpool.extras",
        "kvpool.layout",
        "kvpool.render",
        "disagg.plan",
        "disagg.protocol",
        "disagg.runtime",
        "disagg.portable",
        "disagg.snapshot",
        "disagg.store",
    ),
    "socket": ("disagg.protocol",),
    "ssl": ("disagg.protocol",),
    "threading": ("disagg.protocol",),
    "typer": ("kvpool", "disagg", "kvpool_cuda", "kvpool_npu"),
    "disagg": ("kvpool",),
    "kvpool_cuda": ("kvpool", "disagg"),
    "kvpool_npu": ("kvpool", "disagg"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder(name: str) -> tuple[str, str]:
    """Package and folder of a module or name; a name of the package itself counts as its top."""
    package, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    known = any(part in floor for floor in FLOORS[package])
    return package, part if known else package


def floor(package: str, part: str) -> int:
    return next(n for n, parts in enumerate(FLOORS[package]) if part in parts)


def imports(node: ast.AST, where: str = ""):
    """(imported name, where it is imported if not at the top of the module)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, where) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((f"{child.module}.{alias.name}", where) for alias in child.names)
        elif isinstance(child, ast.FunctionDef):
            yield from imports(child, f" in {child.name}()")
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from imports(child, " under TYPE_CHECKING")
        else:
            yield from imports(child, where)


def allowed(module: str, name: str) -> bool:
    package = name.partition(".")[0]
    inside = any(module == where or module.startswith(f"{where}.") for where in BANNED[package])
    return not inside or (
        (package == "typer" and ".cli" in module)
        or (package == "torch" and module.startswith("kvpool.layout.describe"))  # of tensors
    )


def refused(module: str, source: str) -> list[str]:
    """The imports of a module that break a rule."""
    found = []
    for name, where in imports(ast.parse(source)):
        package = name.partition(".")[0]
        good = package not in BANNED or allowed(module, name)
        if good and package in FLOORS and module.partition(".")[0] in FLOORS:
            ours, theirs = folder(module), folder(name)
            if ours[0] == package:
                good = ours == theirs or floor(*theirs) < floor(*ours)
            else:  # disagg moves what a layout describes, whichever pool it is of
                good = theirs[1] not in ("pools", "kvpool") or ours[1] in ("cli", "testing")
        if not good:
            found.append(f"{module} imports {name}{where}")
    return found


@pytest.mark.parametrize("package", ["kvpool", "disagg", "kvpool_cuda", "kvpool_npu"])
def test_imports_go_down(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert not [line for f in files for line in refused(module_name(f), f.read_text())]


@pytest.mark.parametrize("package", FLOORS)
def test_every_folder_has_a_floor(package):
    named = set().union(*FLOORS[package])
    there = {f.stem for f in (ROOT / package).iterdir() if f.suffix == ".py" or f.is_dir()}
    assert there - {"__init__", "__pycache__"} <= named


@pytest.mark.parametrize("package", ["kvpool", "disagg", "kvpool_cuda", "kvpool_npu"])
def test_no_folder_has_many_modules(package):
    folders = {f.parent for f in (ROOT / package).rglob("*.py")}
    sizes = {d: len([f for f in d.glob("*.py") if f.stem != "__init__"]) for d in folders}
    assert not [f"{module_name(d)}: {n}" for d, n in sizes.items() if n > MOST_MODULES]


@pytest.mark.parametrize(
    ("module", "statement", "line"),
    [
        ("disagg.plan.runs", "from disagg.engines.base import Engine", ""),
        ("disagg.engines.base", "from disagg.digest.digest import Piece", ""),
        ("disagg.protocol.status", "import disagg.runtime.keys", ""),
        ("disagg.plan.bind", "from disagg import TransferError", ""),
        ("disagg.runtime.reader", "from kvpool.pools.base import KVPool", ""),
        ("disagg.runtime.reader", "from kvpool import MLAPool", ""),
        ("kvpool.layout.grid", "def f():\n    from kvpool.pools import base", " in f()"),
        ("kvpool.device.cpu", "if TYPE_CHECKING:\n    import disagg.plan", " under TYPE_CHECKING"),
        ("kvpool.pools.base", "import kvpool_cuda", ""),
        ("kvpool.layout.types", "import torch", ""),
        ("kvpool.render.text", "import typer", ""),
        ("disagg.protocol.messages", "from threading import Lock", ""),
    ],
)
def test_an_import_turned_round_is_refused(module, statement, line):
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    (found,) = refused(module, f"{source}\n{statement}\n")
    assert found.startswith(f"{module} imports ") and found.endswith(line)
