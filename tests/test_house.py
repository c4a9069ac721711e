"""How the library's code is written, as far as a program can see it: lengths, and calls that are
read without the callee beside them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = "kvpool", "kvpool_cuda", "kvpool_npu", "disagg"
FILE_LINES = 350
FUNCTION_LINES = 60
POSITIONAL = 5

CODE_LINES = {
    "disagg/connectors/vllm": 950,
    "disagg/connectors/sglang": 1010,
    "disagg/connectors/sglang_store": 605,
}
"""Of all files of a folder together: a connector stays as long as one reads in one go."""

VARIADIC = {
    "Seq",
    "zip",
    "add_row",
    "ignore",
    "Progress",
    "encoded",
    "finalize",
    "partial",
    "_call",
    "perform",
    "_certified",
    "_printed",
}
"""Callees that take any number of equal arguments."""
KERNEL = "Triton binds the arguments of kernels by position"
EXCEPTIONS = {  # by rule: the place, and why it is better so
    "file": {},
    "function": {},
    "positional": {
        "disagg/engines/nixl/child.py _map_at: mmap": "a function of C",
        "disagg/store/objects.py _fixed: pack": "a function of C",
        "kvpool/device/host_rows.py _move: call": "a function of C",
        "kvpool_cuda/rows.py _rows: _move_part": KERNEL,
        "kvpool_cuda/copies.py _launch: ": KERNEL,
        "kvpool_cuda/copies.py _copy_bytes: _copy_units": KERNEL,
        "kvpool_cuda/rows.py _dequantise_part: store_floats": KERNEL,
        "kvpool_cuda/rows.py _scaled: _scaled_geometry": "lru_cache: one form of each call",
    },
    "splat": {
        "disagg/connectors/vllm/connector.py KvpoolConnector.build_prom_metrics: "
        "KvpoolPromMetrics": "vLLM's arguments, whose number grows with its releases",
    },
}


@cache
def sources() -> dict[str, str]:
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function with its qualified name, and the module itself with an empty one."""
    if not outer:
        yield "", tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = f"{outer}.{node.name}".lstrip(".")
            if isinstance(node, ast.FunctionDef):
                yield name, node
            yield from functions(node, name)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from own_nodes(node)


def tuples(function: ast.AST) -> set[str]:
    """Names that a function binds to a tuple that it spells out."""
    names: set[str] = set()
    for node in own_nodes(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value, ast.Tuple):
                    names.add(target.id)
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts)
                    names |= {
                        t.id
                        for t, v in pairs
                        if isinstance(t, ast.Name) and isinstance(v, ast.Tuple)
                    }
    return names


def callee(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def long_files(path: str, source: str) -> Iterator[str]:
    if len(source.splitlines()) > FILE_LINES:
        yield path


def long_functions(path: str, source: str) -> Iterator[str]:
    for name, node in functions(ast.parse(source)):
        if name and node.end_lineno - node.lineno + 1 > FUNCTION_LINES:
            yield f"{path} {name}"


def many_positional(path: str, source: str) -> Iterator[str]:
    for name, function in functions(ast.parse(source)):
        for node in own_nodes(function):
            if isinstance(node, ast.Call) and callee(node) not in VARIADIC:
                plain = [a for a in node.args if not isinstance(a, ast.Starred)]
                if len(plain) > POSITIONAL:
                    yield f"{path} {name}: {callee(node)}"


def splatted(path: str, source: str) -> Iterator[str]:
    """Structures filled from a sequence, and tuples that are spelled out to be splatted."""
    for name, function in functions(ast.parse(source)):
        spelled = tuples(function)
        for node in own_nodes(function):
            if not isinstance(node, ast.Call) or callee(node) in VARIADIC:
                continue
            stars = [a.value for a in node.args if isinstance(a, ast.Starred)]
            local = any(isinstance(star, ast.Name) and star.id in spelled for star in stars)
            literal = any(isinstance(star, ast.Tuple) for star in stars)
            if stars and (local or literal or callee(node)[:1].isupper()):
                yield f"{path} {name}: {callee(node)}"


RULES = {
    "file": long_files,
    "function": long_functions,
    "positional": many_positional,
    "splat": splatted,
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_hold_but_where_an_exception_says_why(rule):
    places = {place for path, text in sources().items() for place in RULES[rule](path, text)}
    assert sorted(places) == sorted(EXCEPTIONS[rule])
    assert all(EXCEPTIONS[rule].values())


@pytest.mark.parametrize(
    ("rule", "source", "places"),
    [
        ("file", "x = 1\n" * 351, ["f.py"]),
        ("file", "x = 1\n" * 350, []),
        ("function", "class A:\n def f():\n" + "  x\n" * 60, ["f.py A.f"]),
        ("function", "def f():\n" + " x\n" * 59, []),
        ("positional", "def f():\n g(1, 2, 3, 4, 5, 6)", ["f.py f: g"]),
        ("positional", "x.g(1, 2, 3, 4, 5, a=6)", []),
        ("splat", "def f():\n pair = 1, 2\n g(*pair)", ["f.py f: g"]),
        ("splat", "def f():\n a, pair = 1, (1, 2)\n g(*pair)", ["f.py f: g"]),
        ("splat", "Row(*values)", ["f.py : Row"]),
        ("splat", "g(*(1, 2))", ["f.py : g"]),
        ("splat", "def f(values):\n g(*values)", []),
    ],
)
def test_rules_see_what_they_are_for(rule, source, places):
    assert list(RULES[rule]("f.py", source)) == places


def code_lines(source: str) -> int:
    """Lines that are no comment, no docstring (of an attribute either) and not blank."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(n not in texts and line.strip()[:1] not in ("", "#") for n, line in lines)


@pytest.mark.parametrize("folder", CODE_LINES)
def test_a_connector_is_short(folder):
    texts = [text for path, text in sources().items() if path.startswith(f"{folder}/")]
    assert 0 < sum(map(code_lines, texts)) <= CODE_LINES[folder]


def test_lines_of_code_are_what_is_neither_text_nor_blank():
    assert code_lines('"""a\nb"""\n\n# c\nx = 1  # d\n"""e"""\ny = """f\ng"""\n') == 3
