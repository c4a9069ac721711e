"""A model's config.json, read field by field with every value checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from kvpool.layout.text import nearest

MAX_VALUE = 1 << 31
MAX_LAYERS = 1 << 16
_CONFIGS = resources.files("kvpool.models") / "configs"
ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "hidden_size": ("n_embd", "d_model", "embed_dim"),
    "head_dim": ("attention_head_dim",),
    "sliding_window": ("sliding_window_size", "attention_window_size"),
    "num_nextn_predict_layers": ("num_mtp_layers", "mtp_num_hidden_layers"),
}


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of a config of type `model`; `inside` is the path of a nested object, with a dot.

    A null field is an absent one. A field that does not fit raises ValueError naming model type,
    field, the expected and the found value. `used` are the paths of fields that were asked for,
    `needs` the fields that must be given.
    """

    values: Mapping[str, Any]
    model: str
    inside: str = ""
    used: set[str] = field(default_factory=set, compare=False, repr=False)
    needs: frozenset[str] = frozenset()

    def get(self, name: str) -> Any:
        self.used.add(self.inside + name)
        return self.values.get(name)

    def ignore(self, *names: str) -> None:
        """Marks fields that say nothing of this type's state: they are not refused as unread."""
        self.used.update(self.inside + name for name in names)

    def wrong(self, name: str, expected: str) -> ValueError:
        value = self.get(name)
        seen = "it is missing" if value is None else f"got {short(value)}"
        return ValueError(f"{self.model} config: {self.inside}{name} must be {expected}, {seen}.")

    def whole(self, name: str, least: int = 1, most: int = MAX_VALUE) -> int:
        value = self.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most:,}")
        return value

    def whole_or(self, name: str, default: int) -> int:
        """A whole number from 1, or `default` where the field is absent."""
        return default if self.get(name) is None else self.whole(name)

    def flag(self, name: str) -> bool:
        """True or false; false where the field is absent."""
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value is True

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.get(name) is not None

    def needed(self, name: str) -> bool:
        return self.has(name) or name in self.needs

    def inner(self, name: str) -> Fields:
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Fields(value, self.model, f"{self.inside}{name}.", self.used)

    def named(self, name: str) -> str:
        """The name under which a config has the number `name`: itself or one of ALIASES."""
        aliases = {n: self.get(n) for n in (name, *ALIASES.get(name, ())) if self.has(n)}
        if len({repr(value) for value in aliases.values()}) > 1:
            raise ValueError(f"{self.model} config: {aliases} mean the same and must be equal.")
        return next(iter(aliases), name)

    def subset(self, name: str, allowed: range) -> tuple[int, ...]:
        """A list of distinct whole numbers of `allowed`."""
        values = self.each(name, allowed)
        if len(set(values)) != len(values):
            raise self.wrong(name, "a list of distinct numbers")
        return values

    def each(self, name: str, allowed: Sequence[Any], length: int | None = None) -> tuple[Any, ...]:
        """A list of values of `allowed`: `length` of them, one per layer, or any number."""
        values, span = self.get(name), isinstance(allowed, range)
        choice = f"{allowed[0]} to {allowed[-1]}" if span else ", ".join(map(repr, allowed))
        if not isinstance(values, (list, tuple)) or length not in (None, len(values)):
            of = f"{length} values, one for each layer" if length else f"numbers from {choice}"
            raise self.wrong(name, f"a list of {of}")
        kinds = {type(value) for value in allowed}
        strange = [v for v in values if type(v) not in kinds or v not in allowed]
        if strange:
            raise ValueError(
                f"{self.model} config: {self.inside}{name} must list values of {choice}, got "
                f"{short(strange[0])}."
            )
        return tuple(values)

    @property
    def num_layers(self) -> int:
        return self.whole(self.named("num_hidden_layers"), most=MAX_LAYERS)

    @property
    def num_draft_layers(self) -> int:
        """Draft (multi-token prediction) layers, under any of the names in use."""
        name = self.named("num_nextn_predict_layers")
        return self.whole(name, 0, 64) if self.has(name) else 0


def read_config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """A config as a mapping: of a file, a directory that has config.json, or a shipped name.

    A shipped name comes before a directory of that name (write `./name`). Raises ValueError where
    there is no such file, or it is no JSON object.
    """
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, Path)):
        raise ValueError(
            "config: give config.to_dict() of a transformers config, a path, a shipped name or a "
            f"mapping; got {type(config).__name__}."
        )
    path = Path(config)
    try:
        if isinstance(config, str) and config in shipped():
            name, data = f"shipped config {config}", (_CONFIGS / f"{config}.json").read_bytes()
        else:
            path = path / "config.json" if path.is_dir() else path
            name, data = str(path), path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"config {str(path)!r}: {reason}.{nearest(str(config), shipped())} Give the path "
            "of a config.json or of its directory, the fields as a mapping, or a shipped config: "
            f"{', '.join(shipped())}. A model type alone has no sizes, and nothing is downloaded."
        ) from None
    return json_object(name, data)


def json_object(name: str, data: bytes) -> dict[str, Any]:
    """The object that a file called `name` holds. Raises ValueError if it holds none."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name}: must hold a JSON object, got {short(values)}.")
    return values


def shipped() -> tuple[str, ...]:
    """Names of the shipped configs."""
    return tuple(sorted(path.name.removesuffix(".json") for path in _CONFIGS.iterdir()))


def short(value: Any) -> str:
    """A value in an error, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
