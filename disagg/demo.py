"""`kvpool demo`: a real transformer prefills in one process and decodes in another.

The model has random weights from a fixed seed, so that both processes build the same one. The
verdict compares with a run in one process over transformers' own cache, which knows nothing of
pools.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.room import KVPoll

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from disagg.endpoint import DecodeEndpoint

ROOM = "demo"
PATIENCE = 600.0
SHARED = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 1 << 17,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, **EXPERTS},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "num_mtp_layers": 0,
        **EXPERTS,
    },
}


class ModelName(str, Enum):
    """Families that the demo can build."""

    llama = "llama"
    qwen3_moe = "qwen3_moe"
    deepseek_v3 = "deepseek_v3"


class EngineName(str, Enum):
    """Engines that the demo can use."""

    local = "local"
    nixl = "nixl"


@dataclass(frozen=True)
class Settings:
    """What both processes must agree on, and each side's page size."""

    model: str
    engine: str
    prompt_tokens: int
    chunk_tokens: int
    dtype: str
    seed: int
    threads: int
    prefill_page: int
    decode_page: int

    def chunks(self) -> list[range]:
        """Positions of the prompt, chunk by chunk."""
        size, end = self.chunk_tokens, self.prompt_tokens
        return [range(at, min(at + size, end)) for at in range(0, end, size)]

    def build(self) -> tuple[Any, torch.Tensor]:
        """The model and the prompt `[1, T]`, the same in every process."""
        import torch
        import transformers

        torch.set_num_threads(self.threads)
        torch.manual_seed(self.seed)
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        config = transformers.AutoConfig.for_model(self.model, **SHARED, **MODELS[self.model])
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=getattr(torch, self.dtype))
        prompt = torch.randint(0, model.config.vocab_size, (1, self.prompt_tokens))
        return model.eval(), prompt

    def pool(self, model: Any, page: int, tokens: int) -> Any:
        """A pool for `tokens` tokens of one request, and three pages more."""
        from kvpool.integrations.transformers import pool_for

        pages = -(-tokens // page) + 4
        return pool_for(model.config, num_pages=pages, page_size=page, dtype=self.dtype)


def demo(
    model: Annotated[ModelName, typer.Option(help="Model family.")] = ModelName.llama,
    engine: Annotated[EngineName, typer.Option(help="What moves the bytes.")] = EngineName.local,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 2000,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Prefill in chunks of so many.")] = 512,
    prefill_page: Annotated[int, typer.Option(min=1, help="Tokens a page on prefill.")] = 64,
    decode_page: Annotated[int, typer.Option(min=1, help="Tokens a page on decode.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of weights and prompt.")] = 0,
) -> None:
    """Prefill in one process, decode in another, and compare with a run in a single process.

    Exit status 1 if a logit of a decoded step or a live byte of the decode pool differs.
    """
    from rich.console import Console

    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"dtype: float32, bfloat16 or float16, got {dtype!r}.")
    if find_spec("transformers") is None:
        raise typer.BadParameter("transformers is not installed. Install kvpool[demo].")
    threads = max(1, (multiprocessing.cpu_count() or 2) // 2)
    settings = Settings(
        model.value,
        engine.value,
        prompt_tokens,
        chunk_tokens,
        dtype,
        seed,
        threads,
        prefill_page,
        decode_page,
    )
    console = Console()
    try:
        good = run(settings, new_tokens, console)
    except (RuntimeError, TimeoutError) as error:
        console.print(f"[red]FAIL[/red] {error}")
        good = False
    if not good:
        raise typer.Exit(1)


def run(settings: Settings, new_tokens: int, console: Console) -> bool:
    """The whole demo; whether everything was equal."""
    import torch

    from disagg.endpoint import DecodeEndpoint
    from disagg.engines.base import create_engine
    from kvpool.allocator import Allocator
    from kvpool.integrations.transformers import PoolCache
    from kvpool.show import human, layout_table

    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    child = spawn.Process(target=prefill_process, args=(there, settings), daemon=True)
    child.start()
    there.close()
    try:
        model, prompt = settings.build()
        total = settings.prompt_tokens + new_tokens
        pool = settings.pool(model, settings.decode_page, total)
        allocator = Allocator(pool)
        request = allocator.new_request()
        allocator.extend(request, settings.prompt_tokens)
        console.print(layout_table(pool.layout, f"{settings.model}: layout of the decode pool"))
        with DecodeEndpoint(pool.layout, create_engine(settings.engine)) as endpoint:
            link = endpoint.connect([_hear(here, child)], timeout=PATIENCE)
            if link.plan is None:
                raise RuntimeError("the hello ended without a plan.")
            console.print(link.plan.explain(settings.prompt_tokens).table())
            endpoint.receive(ROOM, request.address())
            here.send("go")
            wanted = int(settings.prompt_tokens * pool.bytes_per_token)
            _watch(endpoint, wanted, child, console)
            moved = endpoint.metrics(ROOM)
            first = int(endpoint.aux(ROOM)["first_token"])
        console.print(
            f"moved {human(moved.bytes_moved)} in {moved.runs:,} runs of "
            f"{human(moved.bytes_per_run)}: {human(moved.rate)}/s over {settings.engine}, "
            f"bound in {1e3 * moved.bind_seconds:.2f} ms"
        )
        console.print(f"decoding {new_tokens} tokens in this process, then all of it in one ...")
        cache = PoolCache(pool, allocator, [request])
        with torch.no_grad():
            tokens, logits = decode(model, cache, first, new_tokens)
            own = transformers_cache(model)
            expected_first = prefill(model, prompt, own, settings.chunks())
            expected_tokens, expected = decode(model, own, expected_first, new_tokens)
        same_logits = [torch.equal(a, b) for a, b in zip(logits, expected)]
        wrong, checked = compare_bytes(pool, allocator.locations(request)["kv"], own)
        good = all(same_logits) and first == expected_first and tokens == expected_tokens
        _say(console, good, f"logits of {sum(same_logits)} of {new_tokens} decoded steps bit-equal")
        _say(console, not wrong, f"{checked - wrong:,} of {checked:,} live bytes of the pool equal")
        return good and not wrong
    finally:
        child.join(5)
        child.kill()


def prefill_process(pipe: Connection, settings: Settings) -> None:
    """The other process: computes the prompt and offers each chunk as soon as it is there."""
    import torch

    from disagg.endpoint import PrefillEndpoint
    from disagg.engines.base import create_engine
    from kvpool.allocator import Allocator
    from kvpool.integrations.transformers import PoolCache

    model, prompt = settings.build()
    pool = settings.pool(model, settings.prefill_page, settings.prompt_tokens)
    allocator = Allocator(pool)
    request = allocator.new_request()
    cache = PoolCache(pool, allocator, [request])
    with PrefillEndpoint(pool.layout, create_engine(settings.engine)) as endpoint:
        pipe.send(endpoint.address)
        pipe.recv()
        with torch.no_grad():
            for chunk in settings.chunks():
                last = chunk.stop == settings.prompt_tokens
                first = prefill(model, prompt, cache, [chunk])
                aux = {"first_token": first} if last else {}
                endpoint.send(ROOM, request.address(), last=last, aux=aux)
        if endpoint.wait(ROOM, PATIENCE) is not KVPoll.Success:
            raise RuntimeError(f"the hand-off failed: {endpoint.failure(ROOM)}")


def prefill(model: Any, prompt: torch.Tensor, cache: Any, chunks: list[range]) -> int:
    """Runs chunks of the prompt; returns the token that follows them."""
    for chunk in chunks:
        ids = prompt[:, chunk.start : chunk.stop]
        logits = model(ids, past_key_values=cache, use_cache=True).logits
    return int(logits[0, -1].argmax())


def decode(model: Any, cache: Any, token: int, steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy steps from `token` on; returns the tokens and the logits `[V]` of each step."""
    import torch

    tokens, found = [], []
    for _ in range(steps):
        logits = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits
        token = int(logits[0, -1].argmax())
        tokens.append(token)
        found.append(logits[0, -1].clone())
    return tokens, found


def transformers_cache(model: Any) -> Any:
    """transformers' own cache for a model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def compare_bytes(pool: Any, locations: Any, own: Any) -> tuple[int, int]:
    """Bytes of the pool that differ from transformers' own cache, and bytes compared.

    Entries are picked out of the pool's views by location `[T]`, all layers and roles.
    """
    import torch

    wrong = checked = 0
    for layer in pool.layers:
        roles = [region.role for region in pool.layout.regions if region.layer == layer]
        for role, expected in zip(roles, (own.layers[layer].keys, own.layers[layer].values)):
            view = pool.view(role, layer)
            pages, steps = locations // pool.page_size, locations % pool.page_size
            held = view[pages, steps].reshape(len(locations), -1)
            truth = expected[0].transpose(0, 1).reshape(len(locations), -1)
            pair = [x.contiguous().view(torch.uint8) for x in (held, truth)]
            wrong += int((pair[0] != pair[1]).sum())
            checked += pair[0].numel()
    return wrong, checked


def _hear(pipe: Connection, child: BaseProcess) -> str:
    """The prefill process's address, or an error if it ends before it has one."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if pipe.poll(0.2):
            address: str = pipe.recv()
            return address
        if not child.is_alive():
            break
    raise RuntimeError(f"the prefill process ended with status {child.exitcode}; see above.")


def _watch(endpoint: DecodeEndpoint, wanted: int, child: BaseProcess, console: Console) -> None:
    """A progress bar until the room has ended."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("moving", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("moving", total=wanted)
        while not endpoint.wait(ROOM, 0.05).ended:
            progress.update(task, completed=endpoint.metrics(ROOM).bytes_moved)
            if not child.is_alive() and child.exitcode != 0:
                raise RuntimeError(f"the prefill process ended with status {child.exitcode}.")
        progress.update(task, completed=endpoint.metrics(ROOM).bytes_moved)
    if endpoint.poll(ROOM) is KVPoll.Failed:
        raise RuntimeError(f"the hand-off failed: {endpoint.failure(ROOM)}")


def _say(console: Console, good: bool, sentence: str) -> None:
    console.print(f"[green]PASS[/green] {sentence}" if good else f"[red]FAIL[/red] {sentence}")
