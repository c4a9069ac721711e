"""Connectors, a row each: what it needs, how its servers are configured, and its protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from disagg.testing.launch import CPU
from disagg.testing.protocols import (
    HandOver,
    both_at_once,
    by_room,
    by_store,
    one_after_the_other,
    sglang_to_vllm,
    vllm_to_sglang,
)
from disagg.testing.suite import Pair

ConnectorRole = Literal["prefill", "decode"]
Made = tuple[dict[str, Any], dict[str, str]]
"""Arguments and environment of a server."""
TRANSPORTS = {"nixl": ("nixl",), "mooncake": ("mooncake.engine",)}
"""What kvpool's engines import."""
KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is a side's own: its `role`, and the first of the ports that it may listen at. `folder`
    is both sides'.
    """

    role: ConnectorRole
    port: int
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """`modules` are imported by each engine."""

    modules: Mapping[str, tuple[str, ...]]
    configure: Callable[[Pair, Place], Made]
    hand_over: Mapping[tuple[str, str], HandOver]


def _on_cpu(backend: str) -> dict[str, str]:
    """For connectors that ask for an accelerator: see `watch_vllm` and `watch_sglang`."""
    return {"KVPOOL_CONFORM_CPU": backend} if CPU else {}


def _nixl(pair: Pair, place: Place) -> Made:
    config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": KV_ROLE[place.role]}
    config["kv_connector_extra_config"] = dict(pair.settings)
    if CPU:
        config["kv_buffer_device"] = "cpu"
    channel = "VLLM_NIXL_SIDE_CHANNEL"
    env = {f"{channel}_HOST": "127.0.0.1", f"{channel}_PORT": str(place.port)}
    return {"kv_transfer_config": config}, env


def _mooncake(pair: Pair, place: Place) -> Made:
    config = {
        "kv_connector": "MooncakeConnector",
        "kv_role": KV_ROLE[place.role],
        "kv_connector_extra_config": {"mooncake_protocol": "tcp", **pair.settings},
    }
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(place.port), "VLLM_HOST_IP": "127.0.0.1"}
    env |= _on_cpu("mooncake")
    return {"kv_transfer_config": config}, env


def _lmcache(pair: Pair, place: Place) -> Made:
    config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    settings = {
        "chunk_size": 16,
        "local_cpu": False,
        "max_local_cpu_size": 1,
        "remote_url": f"fs://127.0.0.1:{place.port}{place.folder / 'lmcache'}",
        "remote_serde": "naive",
        **pair.settings,
    }
    env = {f"LMCACHE_{name.upper()}": str(value) for name, value in settings.items()}
    # keys are hashes of tokens
    env |= {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
    return {"kv_transfer_config": config}, env


def _sglang(backend: str, place: Place) -> dict[str, Any]:
    flags: dict[str, Any] = {"disaggregation_mode": place.role}
    flags["disaggregation_transfer_backend"] = backend
    flags["disaggregation_bootstrap_port"] = place.port
    if place.role == "decode":
        flags["disaggregation_decode_retraction_backup"] = "none"
    return flags


def _kvpool(pair: Pair, place: Place) -> Made:
    settings = {"engine": pair.transport, **pair.settings}
    side = pair.prefill if place.role == "prefill" else pair.decode
    if side.engine == "sglang":
        return _sglang("kvpool", place), {"KVPOOL_SGLANG": json.dumps(settings)}
    config = {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "disagg.connectors.vllm",
        "kv_role": KV_ROLE[place.role],
        "kv_connector_extra_config": settings,
    }
    return {"kv_transfer_config": config}, {}


CONNECTORS: dict[str, Connector] = {
    "kvpool": Connector(
        modules={"vllm": ("disagg.connectors.vllm",), "sglang": ("disagg.connectors.sglang",)},
        configure=_kvpool,
        hand_over={
            ("vllm", "vllm"): one_after_the_other,
            ("sglang", "sglang"): by_room,
            ("vllm", "sglang"): vllm_to_sglang,
            ("sglang", "vllm"): sglang_to_vllm,
        },
    ),
    "nixl": Connector(
        modules={"vllm": ("nixl",)},
        configure=_nixl,
        hand_over={("vllm", "vllm"): one_after_the_other},
    ),
    "mooncake": Connector(
        modules={"vllm": ("mooncake.engine",)},
        configure=_mooncake,
        hand_over={("vllm", "vllm"): both_at_once},
    ),
    "lmcache": Connector(
        modules={"vllm": ("lmcache.integration.vllm.vllm_v1_adapter",)},
        configure=_lmcache,
        hand_over={("vllm", "vllm"): by_store},
    ),
    "sglang-nixl": Connector(
        modules={"sglang": ("nixl",)},
        configure=lambda pair, place: (_sglang("nixl", place), _on_cpu("nixl")),
        hand_over={("sglang", "sglang"): by_room},
    ),
    "sglang-mooncake": Connector(
        modules={"sglang": ("mooncake.engine",)},
        configure=lambda pair, place: (
            _sglang("mooncake", place),
            {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", **_on_cpu("mooncake")},
        ),
        hand_over={("sglang", "sglang"): by_room},
    ),
}


def modules(pair: Pair, engine: str) -> tuple[str, ...]:
    """What an engine of a pair has to import."""
    return (*CONNECTORS[pair.connector].modules[engine], *TRANSPORTS.get(pair.transport, ()))
