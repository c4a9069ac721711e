"""Moves state between pools: plans derived from layouts, engines that see addresses and lengths.

`import disagg` is light: names load on first use, and `disagg.plan` never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import exports

if TYPE_CHECKING:
    from disagg.engines.base import Engine as Engine
    from disagg.engines.base import EngineUnavailable as EngineUnavailable
    from disagg.engines.base import TransferError as TransferError
    from disagg.engines.base import create_engine as create_engine
    from disagg.plan import IncompatibleLayouts as IncompatibleLayouts
    from disagg.plan import TransferPlan as TransferPlan
    from disagg.plan.bind import CopyBatch as CopyBatch
    from disagg.plan.positions import IncompleteTransfer as IncompleteTransfer
    from disagg.protocol.status import KVPoll as KVPoll
    from disagg.runtime.endpoint import DecodeEndpoint as DecodeEndpoint
    from disagg.runtime.endpoint import HandshakeRefused as HandshakeRefused
    from disagg.runtime.endpoint import PrefillEndpoint as PrefillEndpoint

__all__, __dir__, __getattr__ = exports(
    __name__,
    {
        "plan.bind": "CopyBatch",
        "runtime.endpoint": "DecodeEndpoint HandshakeRefused PrefillEndpoint",
        "engines.base": "Engine EngineUnavailable TransferError create_engine",
        "plan": "IncompatibleLayouts TransferPlan",
        "plan.positions": "IncompleteTransfer",
        "protocol.status": "KVPoll",
    },
)
