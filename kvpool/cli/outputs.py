"""What the commands of kvpool print with --json."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from kvpool.layout.codec import WireLayout as WireLayout


class BudgetWeights(TypedDict):
    """Bytes on all ranks, or of each where they are given."""

    source: Literal["given", "read", "estimated", "none"]
    words: str
    bytes: int


class BudgetShare(TypedDict):
    """Bytes of a role for each token or request, over all stages, on one shard of each."""

    owner: str
    role: str
    per: Literal["token", "request"]
    layers: list[int]
    bytes: float


class BudgetStage(TypedDict):
    """A rank of a pipeline stage. num_* are constructor arguments of pools that fill `bytes`;
    tokens is null where no buffer grows with tokens.
    """

    layers: list[int]
    draft_layers: list[int]
    weights: int
    state: int
    bytes_per_token: float
    bytes_per_request: float
    num_pages: int
    num_window_pages: int
    num_slots: int
    bytes: int
    tokens: int | None
    requests: int


class BudgetCount(TypedDict):
    """What fits in the tightest stage."""

    stage: int | None
    count: int | None


class Budget(TypedDict):
    """What `kvpool budget --json` prints."""

    model: str
    dtype: str
    memory: int
    weights: BudgetWeights
    utilisation: float
    tp: int
    pp: int
    page_size: int
    block_pool: bool
    reserved_requests: int
    context_tokens: int
    shares: list[BudgetShare]
    stages: list[BudgetStage]
    tokens: BudgetCount
    requests: BudgetCount
