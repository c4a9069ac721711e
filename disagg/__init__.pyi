from .engines.base import (
    Engine as Engine,
    EngineUnavailable as EngineUnavailable,
    TransferError as TransferError,
    create_engine as create_engine,
)
from .errors import (
    EndpointClosed as EndpointClosed,
    EndpointDraining as EndpointDraining,
    HandshakeRefused as HandshakeRefused,
    PeerError as PeerError,
    RoomError as RoomError,
    UnknownRoom as UnknownRoom,
    UsageError as UsageError,
    WireError as WireError,
)
from .plan import (
    ExplainRow as ExplainRow,
    Explanation as Explanation,
    Group as Group,
    IncompatibleLayouts as IncompatibleLayouts,
    Reason as Reason,
    TransferPlan as TransferPlan,
)
from .plan.bind import CopyBatch as CopyBatch
from .plan.lookup import IncompleteTransfer as IncompleteTransfer
from .protocol.metrics import (
    ReadTimes as ReadTimes,
    RoomMetrics as RoomMetrics,
    Snapshot as Snapshot,
)
from .protocol.peers.link import Link as Link
from .protocol.peers.liveness import Leases as Leases
from .protocol.status import Ended as Ended, Failure as Failure, KVPoll as KVPoll, Phase as Phase
from .runtime.decode_endpoint import DecodeEndpoint as DecodeEndpoint
from .runtime.prefill_endpoint import PrefillEndpoint as PrefillEndpoint
from .runtime.socket_transport import SocketTransport as SocketTransport
from .runtime.sockets.tls import TLSFiles as TLSFiles
from .runtime.transport import (
    Lost as Lost,
    MemoryNetwork as MemoryNetwork,
    MemoryTransport as MemoryTransport,
    Transport as Transport,
)
from .snapshot import load as load, save as save
