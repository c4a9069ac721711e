"""Command lines of serving engines, and what an engine's plugins need to read its state."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from disagg.testing.suite import EngineSpec, ServerSettings

Role = Literal["single", "prefill", "decode"]
Flags = Mapping[str, Any]

CPU = not Path("/dev/nvidiactl").exists()
MERGED = "kv_transfer_config", "speculative_config"
"""Arguments of a side that are added to what this file makes, not put in its place."""
VLLM: dict[str, Any] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_uvicorn_access_log": True,
    "max_num_seqs": 8,
    "seed": 0,
}
VLLM_CPU = {"kv_cache_memory_bytes": 64 << 20}
VLLM_CPU_STAGES = {"enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}
"""With stages vLLM's CPU runner has room for what the stage before has computed only where a model
is traced.
"""
SGLANG: dict[str, Any] = {
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "random_seed": 0,
}
SGLANG_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 4096,
}
COMMON_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # threads of several engines spin on the same cores
    "OMP_NUM_THREADS": "1",
}
CPU_ENV = {
    "vllm": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    # some models would be compiled, a minute each time
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
}
STATE = Path(__file__).parent / "state"
PLUGINS = {  # files, as they are imported by engines only, which have torch
    "kvpool_conform_vllm": ("vllm.general_plugins", STATE / "watch_vllm.py"),
    "kvpool_conform_sglang": ("sglang.srt.plugins", STATE / "watch_sglang.py"),
}
"""Modules that engines load: the group of their entry point, and the file they are copied from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A server to be started. `model` and `draft` are folders, `connector` further arguments and
    `env` further variables, of a connector; `watch`: where its state is written.
    """

    role: Role
    spec: EngineSpec
    side: ServerSettings
    model: Path
    draft: Path | None
    port: int
    plugins: Path
    watch: Path | None = None
    connector: Flags = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The command line."""
        engine_flags = _vllm(self) if self.side.engine == "vllm" else _sglang(self)
        flags = {**engine_flags, **self.connector}
        args = {name.replace("-", "_"): value for name, value in self.side.args.items()}
        if self.role == "single":
            args = {name: value for name, value in args.items() if _alone(name)}
        for name in MERGED:
            if name in args and name in flags:
                args[name] = {**flags[name], **args[name]}
        module = {
            "vllm": "vllm.entrypoints.openai.api_server",
            "sglang": "sglang.launch_server",
        }[self.side.engine]
        flags |= {**args, "host": "127.0.0.1", "port": self.port}
        return [self.spec.python, "-m", module, *_words(flags, negated=self.side.engine == "vllm")]

    def environment(self) -> dict[str, str]:
        """Of the process."""
        return {
            **environment(self.spec, self.plugins),
            "SGLANG_CPU_OMP_THREADS_BIND": _cores(self.side.tp),
            "KVPOOL_CONFORM": str(self.watch or ""),
            "KVPOOL_CONFORM_SIDE": self.role,
            **self.env,
        }


def environment(spec: EngineSpec, plugins: Path) -> dict[str, str]:
    """Of an engine's Python: this process's, the suite's, and the plugins' folder on its path."""
    env = {**os.environ, **COMMON_ENV, **(CPU_ENV[spec.name] if CPU else {}), **spec.env}
    for name in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
        env.pop(name, None)  # all of them
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, (str(plugins), spec.pythonpath)))}


def _cores(ranks: int) -> str:
    """SGLang asks for cores for each rank: all of them, or one each."""
    count = os.cpu_count() or 1
    return "|".join(str(rank % count) for rank in range(ranks)) if ranks > 1 else f"0-{count - 1}"


def save_plugins(folder: Path) -> Path:
    """A folder on whose path engines find the modules that read their state."""
    for module, (group, source) in PLUGINS.items():
        shutil.copyfile(source, _made(folder) / f"{module}.py")
        metadata = _made(folder / f"{module}-0.dist-info")
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{module} = {module}:register\n")
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _alone(argument: str) -> bool:
    return argument != "kv_transfer_config" and not argument.startswith("disaggregation")


def _vllm(launch: Launch) -> dict[str, Any]:
    side = launch.side
    flags = {**VLLM, **(VLLM_CPU if CPU else {})}
    flags |= {
        "model": str(launch.model),
        "served_model_name": "model",
        "dtype": side.dtype,
        "block_size": side.block_size,
        "tensor_parallel_size": side.tp,
        "pipeline_parallel_size": side.pp,
    }
    if CPU and side.pp > 1:
        flags |= VLLM_CPU_STAGES
    if side.method or launch.draft:
        method = side.method or "draft_model"
        spec: dict[str, Any] = {"method": method}
        spec["num_speculative_tokens"] = 1 if method == "mtp" else 3
        if launch.draft:
            spec["model"] = str(launch.draft)
        flags["speculative_config"] = spec
    return flags


def _sglang(launch: Launch) -> dict[str, Any]:
    side = launch.side
    flags = {**SGLANG, **(SGLANG_CPU if CPU else {})}
    flags |= {
        "model_path": str(launch.model),
        "dtype": side.dtype,
        "page_size": side.block_size,
        "tp_size": side.tp,
        "pp_size": side.pp,
    }
    if side.method:
        flags |= {"speculative_algorithm": side.method.upper()}
    if launch.draft:
        flags |= {"speculative_draft_model_path": str(launch.draft)}
    return flags


def _words(flags: Flags, *, negated: bool) -> list[str]:
    """`{"a_b": 1}` is `--a-b 1`; of False `--no-a-b` where an engine has that, else nothing."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        match value:
            case True:
                words.append(f"--{flag}")
            case False | None:
                words += [f"--no-{flag}"] if negated and value is False else []
            case Mapping():
                words += [f"--{flag}", json.dumps(value)]
            case list() | tuple():
                words += [f"--{flag}", *map(str, value)]
            case _:
                words += [f"--{flag}", str(value)]
    return words
