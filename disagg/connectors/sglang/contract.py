"""The contract of an SGLang rank, which knows its own layout only: each rank serves its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from disagg.connectors.contracts import RankDescription, ServingEngine, serve_contract
from disagg.connectors.settings import Settings
from disagg.contract.server import ContractServer
from disagg.protocol.messages import Convention

if TYPE_CHECKING:
    from disagg.connectors.sglang.manager import KvpoolManager


def serve_rank(
    manager: KvpoolManager, settings: Settings, conventions: Mapping[str, Convention]
) -> ContractServer | None:
    """Serves it where `settings` say so. Ranks of context parallelism that send nothing have none,
    as no decode connects to them.
    """
    if settings.contract is None or manager.is_dummy_cp_rank:
        return None
    prefill = manager.rank.address is not None
    engine = ServingEngine(
        package="sglang",
        produces=prefill,
        consumes=not prefill,
        size=manager.attn_tp_size * manager.pp_size,
        first=manager.pp_rank * manager.attn_tp_size + manager.attn_tp_rank,
        number=manager.system_dp_rank if manager.system_dp_size > 1 else manager.attn_dp_rank,
    )
    rank = RankDescription.of(manager.rank, conventions)
    return serve_contract(settings, engine, [rank], logging.getLogger("sglang.kvpool"))
