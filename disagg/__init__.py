"""Moves KV state between pools: plans from layouts, engines that copy runs of bytes.

Names load on first use; `disagg.plan` never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import loader

if TYPE_CHECKING:
    from disagg.engines.base import Engine as Engine
    from disagg.engines.base import EngineUnavailable as EngineUnavailable
    from disagg.engines.base import TransferError as TransferError
    from disagg.engines.base import create_engine as create_engine
    from disagg.plan import ExplainRow as ExplainRow
    from disagg.plan import Explanation as Explanation
    from disagg.plan import IncompatibleLayouts as IncompatibleLayouts
    from disagg.plan import Reason as Reason
    from disagg.plan import TransferPlan as TransferPlan
    from disagg.plan.bind import CopyBatch as CopyBatch
    from disagg.plan.positions import IncompleteTransfer as IncompleteTransfer
    from disagg.protocol.status import KVPoll as KVPoll
    from disagg.runtime.endpoint import DecodeEndpoint as DecodeEndpoint
    from disagg.runtime.endpoint import HandshakeRefused as HandshakeRefused
    from disagg.runtime.endpoint import PrefillEndpoint as PrefillEndpoint

_HOME = {
    "CopyBatch": "plan.bind",
    "DecodeEndpoint": "runtime.endpoint",
    "Engine": "engines.base",
    "EngineUnavailable": "engines.base",
    "ExplainRow": "plan",
    "Explanation": "plan",
    "HandshakeRefused": "runtime.endpoint",
    "IncompatibleLayouts": "plan",
    "IncompleteTransfer": "plan.positions",
    "KVPoll": "protocol.status",
    "PrefillEndpoint": "runtime.endpoint",
    "Reason": "plan",
    "TransferError": "engines.base",
    "TransferPlan": "plan",
    "create_engine": "engines.base",
}

__all__ = [*_HOME]

__getattr__ = loader(__name__, _HOME)
