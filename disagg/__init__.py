"""Moves KV state between pools: plans from layouts, engines that copy runs of bytes.

Names load on first use; `disagg.plan` never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import exports

if TYPE_CHECKING:
    from disagg.engines.base import Engine as Engine
    from disagg.engines.base import EngineUnavailable as EngineUnavailable
    from disagg.engines.base import TransferError as TransferError
    from disagg.engines.base import create_engine as create_engine
    from disagg.errors import EndpointClosed as EndpointClosed
    from disagg.errors import HandshakeRefused as HandshakeRefused
    from disagg.errors import PeerError as PeerError
    from disagg.errors import RoomError as RoomError
    from disagg.errors import UnknownRoom as UnknownRoom
    from disagg.errors import UsageError as UsageError
    from disagg.errors import WireError as WireError
    from disagg.plan import ExplainRow as ExplainRow
    from disagg.plan import Explanation as Explanation
    from disagg.plan import IncompatibleLayouts as IncompatibleLayouts
    from disagg.plan import Reason as Reason
    from disagg.plan import TransferPlan as TransferPlan
    from disagg.plan.bind import CopyBatch as CopyBatch
    from disagg.plan.positions import IncompleteTransfer as IncompleteTransfer
    from disagg.protocol.decode_state import Link as Link
    from disagg.protocol.liveness import Leases as Leases
    from disagg.protocol.metrics import RoomMetrics as RoomMetrics
    from disagg.protocol.metrics import Snapshot as Snapshot
    from disagg.protocol.status import Failure as Failure
    from disagg.protocol.status import KVPoll as KVPoll
    from disagg.protocol.status import Phase as Phase
    from disagg.runtime.decode_endpoint import DecodeEndpoint as DecodeEndpoint
    from disagg.runtime.prefill_endpoint import PrefillEndpoint as PrefillEndpoint
    from disagg.runtime.transport import MemoryNetwork as MemoryNetwork
    from disagg.runtime.transport import MemoryTransport as MemoryTransport
    from disagg.runtime.transport import Transport as Transport
    from disagg.runtime.zmq_transport import ZmqTransport as ZmqTransport

__all__, __dir__, __getattr__ = exports(
    __name__,
    {
        "engines.base": "Engine EngineUnavailable TransferError create_engine",
        "errors": "EndpointClosed HandshakeRefused PeerError RoomError UnknownRoom "
        "UsageError WireError",
        "plan": "ExplainRow Explanation IncompatibleLayouts Reason TransferPlan",
        "plan.bind": "CopyBatch",
        "plan.positions": "IncompleteTransfer",
        "protocol.decode_state": "Link",
        "protocol.liveness": "Leases",
        "protocol.metrics": "RoomMetrics Snapshot",
        "protocol.status": "Failure KVPoll Phase",
        "runtime.decode_endpoint": "DecodeEndpoint",
        "runtime.prefill_endpoint": "PrefillEndpoint",
        "runtime.transport": "MemoryNetwork MemoryTransport Transport",
        "runtime.zmq_transport": "ZmqTransport",
    },
)
