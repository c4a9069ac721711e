"""What the commands of disagg print with --json."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict

from disagg.cli.doctor import Availability


class Doctor(TypedDict):
    """What `kvpool doctor --json` prints; a version is `-` where a package is not installed."""

    versions: dict[str, str]
    found: list[Availability]


class KeyJSON(TypedDict):
    """A file of `kvpool keys --json`. `fingerprint`: SHA-256 of its certificate."""

    side: str
    file: str
    fingerprint: str
    expires: str


class SnapshotFileJSON(TypedDict):
    """A file of `kvpool snapshot --json`: what it holds, or why it is refused."""

    file: str
    refused: NotRequired[str]
    request: NotRequired[str]
    tokens: NotRequired[int]
    data_bytes: NotRequired[int]
    conventions: NotRequired[dict[str, Any]]
    layout: NotRequired[dict[str, Any]]


class ExplainedRow(TypedDict):
    """Roles and layers that travel alike; runs are those of the worst case."""

    owner: str
    roles: list[str]
    layers: list[int]
    how: str
    why: str
    runs: int
    bytes: int


class ExplainedPlan(TypedDict):
    """What travels to decode ranks that are filled alike, with the runs and bytes of one."""

    decode: list[int]
    rows: list[ExplainedRow]
    runs: int
    bytes: int


class ExplainedRank(TypedDict):
    """A rank: the model or file that it is of, and its number, null where there is one rank."""

    of: str
    number: int | None


class Refusal(TypedDict):
    """Two ranks that cannot be paired, and why."""

    prefill: str
    decode: str
    reason: str


class Alternative(TypedDict):
    """What --compare tried: figures of the busiest rank, or why it is refused."""

    options: list[str]
    runs: int | None
    bytes: int | None
    bytes_per_run: float | None
    median: float | None
    seconds: float | None
    run_seconds: float | None
    refused: str | None


class ExplainJSON(TypedDict):
    """What `kvpool explain --json` prints. `sent`: bytes of each prefill rank; `compared`: of
    --compare, or null; `kvpool pair` leaves it out.
    """

    tokens: int
    prefill: list[ExplainedRank]
    decode: list[ExplainedRank]
    plans: list[ExplainedPlan]
    sent: list[int]
    bytes_per_second: float | None
    seconds: float | None
    supposed_runs_per_second: float | None
    runs_per_second: float | None
    run_seconds: float | None
    refused: list[Refusal]
    compared: NotRequired[list[Alternative] | None]


class ContractSummary(TypedDict):
    """What a side says of itself: its packages, and how many ranks it has for which roles."""

    versions: dict[str, str]
    engine: str
    protocol: int
    serves: list[str]
    size: int
    labels: dict[str, str]


class ObjectionJSON(TypedDict):
    """A fact in which the sides do not fit, both values, and what would make it work."""

    about: str
    prefill: str
    decode: str
    reason: str


class PairJSON(TypedDict):
    """What `kvpool pair --json` prints; a side is left out whose contract cannot be read."""

    pair: bool
    prefill: NotRequired[ContractSummary]
    decode: NotRequired[ContractSummary]
    refused: list[ObjectionJSON]
    explained: ExplainJSON | None


class DemoCheck(TypedDict):
    """What was compared with what transformers keeps."""

    passed: bool
    found: str


class DemoPrompt(TypedDict):
    """What moved of a prompt. `bind_seconds`: spent on making its runs."""

    tokens: int
    bytes: int
    runs: int
    bytes_per_second: float
    bind_seconds: float
    checks: list[DemoCheck]


class Demo(TypedDict):
    """What `kvpool demo --json` prints. `failure`: what ended it early, or null."""

    model: str
    engine: str
    device: str
    dtype: str
    packing: str
    passed: bool
    failure: str | None
    prompts: list[DemoPrompt]


class CheckMoved(TypedDict):
    """The test state that moved. `complete`: every byte was as prefill had it."""

    bytes: int
    seconds: float
    rooms: int
    tokens: int
    complete: bool
    gib_per_second: float


class CheckTransport(TypedDict):
    """What carried bytes and messages, and NIXL's lanes, or null."""

    engine: str
    bytes: str
    messages: str
    lanes: list[str] | None


class CheckJSON(TypedDict):
    """What `kvpool check --json` prints: on prefill's host (--serve) `serves`, `engine` and
    `tokens`, else the other keys.
    """

    serves: NotRequired[list[str]]
    engine: NotRequired[str]
    tokens: NotRequired[int]
    check: NotRequired[bool]
    prefill: NotRequired[ContractSummary]
    decode: NotRequired[ContractSummary]
    refused: NotRequired[list[ObjectionJSON]]
    handshake: NotRequired[list[str]]
    moved: NotRequired[CheckMoved | None]
    transport: NotRequired[CheckTransport | None]
    unchecked: NotRequired[list[str]]


KeysJSON = list[KeyJSON]
SnapshotsJSON = list[SnapshotFileJSON]
