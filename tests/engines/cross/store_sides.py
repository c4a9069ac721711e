"""Real engines as sides of a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tests.engines.cross.hand_over import vllm_engine
from tests.engines.process import Process
from tests.engines.sglang.engines import Engine
from tests.engines.stored import Answer, Prompts


@dataclass(frozen=True, kw_only=True)
class Place:
    """A store's URL, and folders for what oracles save, and for logs."""

    url: str
    watched: Path
    logs: Path

    def watch(self, name: str) -> Path:
        """A new folder for a side's oracle."""
        folder = self.watched / name
        folder.mkdir(parents=True)
        return folder


class EngineSide:
    """An engine that is starting; `salt` is what it calls a request's tenant."""

    def __init__(self, engine: Process, *, name: str, ranks: int, watch: Path, salt: str) -> None:
        self.engine, self.name, self.ranks, self.watch = engine, name, ranks, watch
        self._salt = salt

    def ask(self, prompts: Prompts, tokens: int = 24, tenant: str = "") -> list[Answer]:
        """The tokens after prompts, one after the other."""
        engine, more = self.engine.ready(), {self._salt: tenant} if tenant else {}
        answers = [engine.generate([each], tokens=tokens, **more)[0] for each in prompts]
        return [Answer(_flat(answer["tokens"]), answer["cached"]) for answer in answers]

    def recompute(self, prompts: Prompts, tokens: int = 24) -> list[Answer]:
        """As the same engine computes them, for a tenant of whom nothing is stored."""
        return self.ask(prompts, tokens, f"{self.name} alone")

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _flat(tokens: list[Any]) -> list[int]:
    """vLLM answers with a list for each sequence."""
    return tokens[0] if tokens and isinstance(tokens[0], list) else tokens


def vllm_side(
    model: Path, place: Place, *, tp: int = 1, block_size: int, dtype: str = "float32"
) -> EngineSide:
    """vLLM with prefix caching, in its own environment."""
    name = f"vLLM TP {tp}, blocks {block_size}"
    engine = vllm_engine(
        "store",
        model,
        place.logs,
        extra={"store": place.url},
        watch=(watch := place.watch(name)),
        enable_prefix_caching=True,
        tensor_parallel_size=tp,
        block_size=block_size,
        dtype=dtype,
    )
    return EngineSide(engine, name=name, ranks=tp, watch=watch, salt="salt")


def sglang_side(model: Path, place: Place, *, tp: int = 1, page_size: int) -> EngineSide:
    """SGLang with a radix cache over the store."""
    name = f"SGLang TP {tp}, pages {page_size}"
    engine = Engine(
        "single",
        model,
        place.logs,
        extra={"store": place.url},
        watch=(watch := place.watch(name)),
        environ={"KVPOOL_WATCH_STORE": "1"},
        disable_radix_cache=False,
        radix_cache_backend="kvpool",
        tp_size=tp,
        page_size=page_size,
        dtype="float32",
    )
    return EngineSide(engine, name=name, ranks=tp, watch=watch, salt="cache_salt")
