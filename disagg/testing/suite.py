"""Pairs of serving engines to try, from a TOML file: what `kvpool conform` runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvpool.layout.text import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES = "vllm", "sglang"
TRANSPORTS = "local", "nixl", "mooncake"
CONNECTORS = {
    "kvpool": ENGINES,
    "nixl": ("vllm",),
    "mooncake": ("vllm",),
    "lmcache": ("vllm",),
    "sglang-nixl": ("sglang",),
    "sglang-mooncake": ("sglang",),
}
"""Connectors, and the engines that can have each."""


class SuiteError(ValueError):
    """A suite file that cannot be run: the message has the file, the row, the key and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The Python that an engine is installed in. `pythonpath` and `python` are absolute."""

    name: str
    python: str
    pythonpath: str
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server. `draft` is a model's name or None, `args` are further arguments of the
    engine's command line: names without dashes, and values.
    """

    engine: str
    block_size: int
    tp: int
    pp: int
    dtype: str
    draft: str | None
    method: str | None
    args: Mapping[str, Any]

    def words(self) -> str:
        """`vllm 32 tp2 eagle`: the engine, its block size, and what is not usual."""
        words = [self.engine, str(self.block_size)]
        words += [f"{key}{size}" for key, size in (("tp", self.tp), ("pp", self.pp)) if size > 1]
        words += [word for word in (self.dtype, self.method) if word not in (None, "bfloat16")]
        return " ".join([*words, *(f"{key}={value}" for key, value in self.args.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A row: a prefill server and a decode server with a connector between them. `transport` is
    the engine of kvpool that moves bytes, `settings` the connector's own configuration, `prompts`
    lengths in tokens.
    """

    name: str
    connector: str
    model: str
    prefill: ServerSettings
    decode: ServerSettings
    transport: str
    settings: Mapping[str, Any]
    prompts: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What a file says. A model is a folder, or the command that makes it: an engine's name, the
    arguments of its Python; `{folder}` among them is where models are kept, and the last line that
    it prints is the model's folder.
    """

    engines: Mapping[str, EngineSpec]
    models: Mapping[str, str | tuple[str, ...]]
    pairs: tuple[Pair, ...]

    def digest(self, pair: Pair) -> str:
        """A hash of all settings of a row, with those of its engines and models."""
        names = {pair.model, pair.prefill.draft, pair.decode.draft} - {None}
        settings = {
            "pair": asdict(pair),
            "engines": [asdict(self.engines[side.engine]) for side in (pair.prefill, pair.decode)],
            "models": {name: self.models[name] for name in sorted(filter(None, names))},
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class ValueKind(NamedTuple):
    """What a value has to be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0  # True is an int


def _is_list(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(holds, value))


def _one_of(names: tuple[str, ...]) -> ValueKind:
    return ValueKind(f"one of {', '.join(names)}", lambda value: value in names)


TEXT = ValueKind("a text that is not empty", _is_text)
COUNT = ValueKind("a whole number from 1", _is_count)
TABLE = ValueKind("a table", lambda value: isinstance(value, dict))
TEXTS = ValueKind(
    "a table of texts", lambda value: TABLE.holds(value) and all(map(_is_text, value.values()))
)
COUNTS = ValueKind("a list of whole numbers from 1", _is_list(_is_count))
MODEL = ValueKind(
    "a folder, or a list: an engine and the arguments of its Python",
    lambda value: _is_text(value) or _is_list(_is_text)(value),
)
FILE = {
    "engines": TABLE,
    "models": TABLE,
    "defaults": TABLE,
    "pair": ValueKind("one [[pair]] or more", _is_list(TABLE.holds)),
}
SPEC = {"python": TEXT, "pythonpath": TEXT, "env": TEXTS}
SIDE = {
    "engine": _one_of(ENGINES),
    "block_size": COUNT,
    "tp": COUNT,
    "pp": COUNT,
    "dtype": TEXT,
    "draft": TEXT,
    "method": TEXT,
    "args": TABLE,
}
ROW = {
    "name": TEXT,
    "connector": _one_of((*CONNECTORS,)),
    "model": TEXT,
    "prefill": TABLE,
    "decode": TABLE,
    "side": TABLE,
    "transport": _one_of(TRANSPORTS),
    "settings": TABLE,
    "prompts": COUNTS,
    "new_tokens": COUNT,
}
USUAL = {
    "name": "",
    "transport": "local",
    "settings": {},
    "prompts": [70, 200],
    "new_tokens": 16,
    "side": {"tp": 1, "pp": 1, "dtype": "bfloat16", "draft": None, "method": None, "args": {}},
}
SIDES = "prefill", "decode"
TABLES = "side", *SIDES


def load(path: Path) -> Suite:
    """Reads a suite. Raises SuiteError, and OSError if the file cannot be read."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: not TOML: {error}.") from None
    try:
        return _suite(table, path.absolute().parent)
    except SuiteError as error:
        raise SuiteError(f"{path}: {error}") from None


def _suite(table: dict[str, Any], folder: Path) -> Suite:
    _check("", table, FILE)
    for key in ("engines", "models", "pair"):
        _need("", table, key, FILE[key])
    engines = {name: _spec(name, spec, folder) for name, spec in table["engines"].items()}
    models = {name: _model(name, value, folder) for name, value in table["models"].items()}
    for name, model in models.items():
        if not isinstance(model, str):
            _known(f"models.{name}", model[0], engines)
    defaults = table.get("defaults", {})
    _check_row("defaults: ", defaults, ROW)
    suite = Suite(engines=engines, models=models, pairs=())
    pairs: dict[str, Pair] = {}
    for number, row in enumerate(table["pair"], 1):
        place = f"pair {number}: "
        _check_row(place, row, ROW)
        for values, choice in _expanded(_flat(USUAL) | _flat(defaults) | _flat(row)):
            pair = _pair(place, values, choice)
            _agree(place, pair, suite)
            if pair.name in pairs:
                raise SuiteError(f"{place}name: {pair.name!r} is another row's; give it its own.")
            pairs[pair.name] = pair
    return replace(suite, pairs=tuple(pairs.values()))


def _check(place: str, table: Mapping[str, Any], kinds: Mapping[str, ValueKind]) -> None:
    """Raises SuiteError for a key that is not known, or a value that is not of its kind."""
    for key, value in table.items():
        if key not in kinds:
            sentence = f"no such key; there are {', '.join(kinds)}."
            raise SuiteError(f"{place}{key}: {sentence}{nearest(key, kinds)}")
        if not kinds[key].holds(value):
            raise SuiteError(f"{place}{key}: {value!r} is not {kinds[key].words}.")


def _need(place: str, table: Mapping[str, Any], key: str, kind: ValueKind) -> None:
    if key not in table:
        raise SuiteError(f"{place}{key}: missing; give {kind.words}.")


def _check_row(place: str, row: Mapping[str, Any], kinds: Mapping[str, ValueKind]) -> None:
    """As `_check`, for each value of a list where several rows are meant, and for the sides."""
    for key, value in row.items():
        for entry in value if _is_several(key, value) else [value]:
            _check(place, {key: entry}, kinds)
        if key in TABLES:
            _check_row(f"{place}{key}.", value, SIDE)


def _is_several(key: str, value: object) -> bool:
    return isinstance(value, list) and bool(value) and key not in ("prompts", *TABLES)


def _spec(name: str, table: Any, folder: Path) -> EngineSpec:
    _check("engines.", {name: table}, dict.fromkeys(ENGINES, TABLE))
    _check(f"engines.{name}.", table, SPEC)
    variable = f"KVPOOL_{name.upper()}_PYTHON"
    python = table.get("python") or os.environ.get(variable, sys.executable)
    paths = _paths(table.get("pythonpath", ""), folder)
    paths += _paths(os.environ.get(f"{variable}PATH", ""), Path.cwd())
    return EngineSpec(
        name=name,
        python=_absolute(python, folder if "python" in table else Path.cwd()),
        pythonpath=os.pathsep.join(paths),
        env=table.get("env", {}),
    )


def _paths(text: str, folder: Path) -> list[str]:
    return [_absolute(path, folder) for path in text.split(os.pathsep) if path]


def _absolute(path: str, folder: Path) -> str:
    """Links are kept: the Python of a virtual environment is one."""
    return os.path.abspath(folder / Path(path).expanduser())


def _model(name: str, value: Any, folder: Path) -> str | tuple[str, ...]:
    _check("models.", {name: value}, {name: MODEL})
    return _absolute(value, folder) if isinstance(value, str) else tuple(value)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose sides' settings are keys as `prefill.tp`."""
    flat = {key: value for key, value in row.items() if key not in TABLES}
    for side in SIDES:
        settings = row.get("side", {}) | row.get(side, {})
        flat |= {f"{side}.{key}": value for key, value in settings.items()}
    return flat


def _expanded(row: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """A row for each combination of the values that are lists, and which it is, in words."""
    lists = {key: value for key, value in row.items() if _is_several(key, value)}
    for choice in itertools.product(*lists.values()):
        chosen = dict(zip(lists, choice))
        yield row | chosen, [f"{key}={value}" for key, value in chosen.items()]


def _pair(place: str, row: dict[str, Any], choice: list[str]) -> Pair:
    for key in ("connector", "model"):
        _need(place, row, key, ROW[key])
    sides = {}
    for side in SIDES:
        settings = {key: row[f"{side}.{key}"] for key in SIDE if f"{side}.{key}" in row}
        for key in ("engine", "block_size"):
            _need(f"{place}{side}.", settings, key, SIDE[key])
        sides[side] = msgspec.convert(settings, ServerSettings)
    prefill, decode = sides.values()
    usual = f"{row['connector']}: {row['model']}, {prefill.words()} to {decode.words()}"
    name = ", ".join([row["name"], *choice]) if row["name"] else usual
    return msgspec.convert(row | sides | {"name": name}, Pair)


def _agree(place: str, pair: Pair, suite: Suite) -> None:
    """Raises SuiteError for settings that exclude one another, or a name that nothing has."""
    _known(f"{place}model", pair.model, suite.models)
    for name, side in (("prefill", pair.prefill), ("decode", pair.decode)):
        _known(f"{place}{name}.engine", side.engine, suite.engines)
        engines = CONNECTORS[pair.connector]
        if side.engine not in engines:
            raise SuiteError(
                f"{place}{name}.engine: {side.engine!r} cannot have connector {pair.connector!r}, "
                f"only {' and '.join(engines)} can."
            )
        if side.draft is not None:
            _known(f"{place}{name}.draft", side.draft, suite.models)
            if side.method is None:
                raise SuiteError(
                    f"{place}{name}.method: missing beside draft {side.draft!r}; give eagle, "
                    "eagle3, mtp or what else the engine calls it."
                )


def _known(place: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        words = f"{name!r} is not in this file, which has {', '.join(names)}."
        raise SuiteError(f"{place}: {words}{nearest(name, names)}")
