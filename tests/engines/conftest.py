"""Tests inside a serving engine's own environment: collected only where the engine is installed."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.launcher import end_launchers
from tests.engines.pair import LENGTHS
from tests.engines.process import ending

collect_ignore_glob = []
if not find_spec("vllm"):
    collect_ignore_glob += ["test_*.py", "vllm"]
elif not torch.cpu._is_amx_tile_supported():  # the kernels of DeepSeek-V4 in vLLM's CPU build
    collect_ignore_glob += ["vllm/test_deepseek_v4.py"]
if not find_spec("sglang"):
    collect_ignore_glob += ["sglang"]
if not find_spec("sglang") or "KVPOOL_VLLM_PYTHON" not in os.environ:  # they need both
    collect_ignore_glob += ["cross"]


@pytest.fixture(scope="session", autouse=True)
def launchers() -> Iterator[None]:
    """Processes that fork engines end with the tests."""
    yield
    end_launchers()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def start(models: Path, tmp_path: Path, engine: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Starts an engine, which ends with the test: `start(role, model, **arguments)`. `engine`: the
    serving engine's, of its folder.
    """
    from tests.engines.vllm.models import save

    def one(role: Any, model: str, **arguments: Any) -> Any:
        return engine(role, save(model, models), tmp_path / "logs", **arguments)

    yield from ending(one)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """This process computes on one thread, beside an engine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def transformer(models: Path, one_thread: None) -> Callable[..., Any]:
    """Loads a model of `transformers`."""
    from tests.engines.transformer import Transformer
    from tests.engines.vllm.models import save

    return lambda name, dtype="float32": Transformer(save(name, models), dtype)


@pytest.fixture(scope="session")
def expected(
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
    engine: Callable[..., Any],
    answer: Callable[..., Any],
) -> Callable[..., list[Any]]:
    """What one engine that prefills and decodes answers to the prompts of `LENGTHS`, one after the
    other.
    """
    from tests.engines.vllm.engines import prompts
    from tests.engines.vllm.models import save

    known: dict[Any, list[Any]] = {}
    logs = tmp_path_factory.mktemp("single")

    def ask(model: str, **arguments: Any) -> list[Any]:
        key = model, repr(sorted(arguments.items()))
        if key not in known:
            with engine("single", save(model, models), logs, **arguments).ready() as single:
                known[key] = [answer(single, model, prompt) for prompt in prompts(*LENGTHS)]
        return known[key]

    return ask
