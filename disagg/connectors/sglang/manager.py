"""SGLang's KV manager: one of a rank, between its scheduler's queues and our endpoints."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

import requests
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs

from disagg.connectors.rank.rank import Rank
from disagg.connectors.scales import scale_conventions
from disagg.connectors.settings import Settings
from disagg.connectors.sglang.bootstrap import split
from disagg.connectors.sglang.contract import serve_rank
from disagg.connectors.sglang.conventions import draft_conventions, engine_conventions
from disagg.connectors.sglang.metadata import write_row
from disagg.connectors.sglang.metrics import publish
from disagg.connectors.sglang.pools import ModelPools, engine_layout
from disagg.connectors.sglang.scales import rank_scales
from disagg.connectors.sglang.states import Ranks
from disagg.protocol.codec import Aux
from disagg.protocol.messages import Convention
from kvpool.layout import PoolLayout

log = logging.getLogger("sglang.kvpool")

SETTINGS = "KVPOOL_SGLANG"
"""The environment variable that holds `Settings` as JSON: SGLang has no options for backends."""
ALL_RANKS = dict.fromkeys(
    ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"), -1
)
"""What a bootstrap server is asked for, to know how many there are."""
TURN_SECONDS = 0.0002
"""Between two turns at least: SGLang polls hundreds of requests one after the other."""
STAGE_SECONDS = 0.001
"""Between two turns of a pipeline stage whose senders are not polled."""
RELEASE = (
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0: pages of an aborted request would be used "
    "again while a read may write to them"
)
DIVIDED = "on prefill: ranks share a page's tokens, and SGLang lets no decode of kvpool do so"
HTTP_SECONDS = 5.0


class KvpoolManager(CommonKVManager):
    """The endpoints of a rank, and the states of its rooms in SGLang's `request_status`. SGLang's
    bootstrap server gives decode the addresses of prefill's endpoints in place of its managers'.
    """

    supports_deferred_decode_kv_release = True
    supports_role_switch = True

    def __init__(self, args: Any, mode: DisaggregationMode, *more: Any) -> None:
        self._next_turn = 0.0
        self.lock = threading.RLock()
        """Of what `turn` changes: it has a thread where SGLang polls no sender."""
        self.sending: set[int] = set()
        """Rooms whose end SGLang has not been told."""
        self.reading: dict[int, int] = {}
        """Rows of the metadata, by room that was asked for and whose pages a read may touch."""
        self.stopped = False
        self.known: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        """Endpoint addresses by bootstrap address, as they were when they were used last."""
        super().__init__(args, mode, *more)
        # each CP rank of prefill gathers what the others compute, so one sends all of it; where
        # they divide it instead, SGLang takes its own backends only
        self.enable_all_cp_ranks_for_transfer = False
        self.is_dummy_cp_rank = self.attn_cp_rank != 0

    def start(self, queue: Any) -> None:
        """Makes the endpoints, over the pools of the queue whose manager this is."""
        self.queue, scheduler = queue, queue.scheduler
        prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        self._refuse_options(prefill)
        model = scheduler.model_config
        ranks = model_ranks(
            model,
            [*scheduler.tp_worker.model_runner.model.modules()],
            window=scheduler.sliding_window_size,
            tp=(self.attn_tp_rank, self.attn_tp_size),
        )
        settings = Settings.of_environment(  # a request waits as long as SGLang would have it wait
            SETTINGS,
            unused=("stream", "shared_memory"),
            lease=float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()),
            offer_timeout=float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
        )
        runners = draft_runners(scheduler)
        own = [] if queue.draft_token_to_kv_pool is None else runners  # others read the target's
        self.layout = engine_layout(
            queue.token_to_kv_pool,
            ranks,
            state_types=self.kv_args.state_types,
            total_layers=model.num_hidden_layers,
            drafts=[draft_pools(scheduler, runner, ranks) for runner in own],
            requests=scheduler.req_to_token_pool,
            model=model.model_path,
        )
        self.drafts: bool = scheduler.spec_algorithm.carries_draft_hidden_states()
        """Whether a draft begins with hidden states that prefill sends as metadata."""
        self.metadata = queue.metadata_buffers if prefill else queue.transfer_queue.metadata_buffers
        self.tells = self.attn_tp_rank == 0 and self.pp_rank == self.pp_size - 1
        """Whether this rank of prefill sends the metadata, which all of them have."""
        if not prefill and self.server_args.disaggregation_decode_enable_radix_cache:
            refuse_windows(self.layout.layout)
        document = self._conventions(runners)
        self.rank = Rank(
            settings,
            self.layout.layout,
            produces=prefill,
            consumes=not prefill,
            readers=self.attn_tp_size * self.pp_size,
            log=log,
            conventions=document,
            number=self.number,
        )
        self.contract = serve_rank(self, settings, document)
        self.publisher = publish(self.rank.stats, self.server_args)
        # SGLang tells no manager that its process ends
        self.stop = Finalize(None, self._stop, exitpriority=1)
        """SGLang makes no step any more, in this role or at all."""
        if prefill:
            self.local_ip, self.rank_port = split(self.rank.prefill.address)
            super().register_to_bootstrap()
            if self.pp_rank:
                threading.Thread(target=self._keep_turning, daemon=True).start()
        else:
            queue.transfer_queue.deferred_kv_release_timeout = math.inf  # reads do end

    @property
    def number(self) -> int:
        """Of this rank among all of the engine's, replicas included."""
        sizes = self.pp_size, self.attn_dp_size, self.attn_cp_size, self.attn_tp_size
        ranks = self.pp_rank, self.attn_dp_rank, self.attn_cp_rank, self.attn_tp_rank
        # SGLang counts replicas and groups of attention's data parallelism in one
        number: int = self.system_dp_rank // self.attn_dp_size
        for size, rank in zip(sizes, ranks):
            number = number * size + rank
        return number

    def _conventions(self, drafts: list[Any]) -> dict[str, Convention]:
        """What the bytes of this rank mean, where these runners draft."""
        scheduler = self.queue.scheduler
        target = scheduler.tp_worker.model_runner
        document = engine_conventions(scheduler.model_config, [*target.model.modules()])
        for runner in drafts[:1]:
            document |= draft_conventions(runner, self.drafts)
        return document | scale_conventions(self.layout.layout, rank_scales([target, *drafts]))

    def register_to_bootstrap(self) -> None:
        """Called before there are endpoints; `start` does it."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Asks once how many ranks a prefill has; what can be read of them is the plan's to say."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        url = f"http://{bootstrap_addr}/route"
        try:
            answer = requests.get(url, params=ALL_RANKS, timeout=HTTP_SECONDS)
            answer.raise_for_status()
            info = PrefillServerInfo(**answer.json())
        except (requests.RequestException, TypeError, ValueError) as error:
            log.error("the ranks of prefill at %s are unknown: %s", bootstrap_addr, error)
            return False
        info.target_tp_rank, info.target_cp_ranks = 0, [0]
        info.target_tp_ranks = list(range(info.attn_tp_size))
        info.target_pp_ranks = list(range(info.pp_size))
        info.required_dst_info_num = info.required_prefill_response_num = 1
        self.prefill_info_table[bootstrap_addr] = info
        return True

    def turn(self) -> None:
        """Lets the endpoints go on, and notes what has become of rooms."""
        with self.lock:
            if time.monotonic() >= self._next_turn:
                self._turn()
                self._next_turn = time.monotonic() + TURN_SECONDS

    def _turn(self) -> None:
        results = self.rank.results([str(room) for room in self.sending])
        for name in results.sent | results.received:
            try:
                self._ended(int(name), results.why.get(name), results.aux.get(name))
            except Exception:  # of one room: the results tell of the others only now
                log.exception("room %s has ended, and SGLang was not told", name)
        for room in self.sending:
            if self.request_status.get(room) == KVPoll.Bootstrapping and self.rank.asked(room):
                self.update_status(room, KVPoll.WaitingForInput)

    def _keep_turning(self) -> None:
        """Of pipeline stages SGLang polls the first one's senders only, and reads of the others how
        their rooms stand.
        """
        while not self.stopped:
            time.sleep(STAGE_SECONDS)
            if self.sending:
                self.turn()

    def _stop(self) -> None:
        self.stopped = True
        if self.contract is not None:
            self.contract.drain()
        self.publisher.close()
        self.rank.close()
        if self.contract is not None:
            self.contract.close()

    def teardown(self) -> None:
        """SGLang changes the engine's role: another manager takes over its pools."""
        self.stop()
        self.server_socket.close(linger=0)
        self._zmq_ctx.destroy(linger=0)

    def _ended(self, room: int, why: object, aux: Aux | None) -> None:
        """Tells SGLang that a room has ended: `why` it failed, or what has come with it."""
        self.sending.discard(room)
        row = self.reading.pop(room, 0)
        try:
            if aux is not None:
                write_row(self.metadata, row, room, aux, drafts=self.drafts)
        except Exception as error:  # values of a peer, which torch may not take
            why = error
        if why is None:
            self.update_status(room, KVPoll.Success)
        else:
            self.fail(room, why)

    def forget_lost(self, bootstrap_addr: str) -> None:
        """Asks the bootstrap server again where prefills are gone: others may have their place."""
        if not all(self.rank.links.alive(peers) for peers in self.known[bootstrap_addr]):
            del self.known[bootstrap_addr]
            self.prefill_info_table.pop(bootstrap_addr, None)
            with self.connection_lock:
                for key in [key for key in self.connection_pool if key.startswith(bootstrap_addr)]:
                    del self.connection_pool[key]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no read can touch the pages of an aborted room."""
        self.turn()
        return bootstrap_room not in self.reading

    def fail(self, room: int, why: object) -> None:
        """SGLang is told of a failure, unless it knows of the room's end."""
        if room in self.request_status and self.check_status(room) != KVPoll.Failed:
            self.record_failure(room, str(why))
            self.update_status(room, KVPoll.Failed)

    def _refuse_options(self, prefill: bool) -> None:
        options, scheduler = self.server_args, self.queue.scheduler
        reused = not prefill and not self.enable_deferred_decode_kv_release
        for wrong, what, instead in (
            (options.enable_memory_saver, "enable_memory_saver", "memory that stays where it is"),
            (getattr(scheduler, "enable_hisparse", False), "enable_hisparse", "the device's pool"),
            (self.dcp_size > 1, f"dcp_size {self.dcp_size} {DIVIDED}", "1"),
            (reused, RELEASE, "1"),
        ):
            if wrong:
                raise ValueError(f"backend kvpool does not know {what}. Use {instead}.")


def refuse_windows(layout: PoolLayout) -> None:
    """Raises ValueError where decode would keep a window that prefill has handed over, which is
    what the next token sees, for a prompt that goes on before it.
    """
    for space in layout.spaces:
        if space.window is not None:
            raise ValueError(
                f"disaggregation_decode_enable_radix_cache: space {space.name} has a window, of "
                "which prefill hands over what the next token sees. SGLang would take it for that "
                "of shorter prefixes too. Leave the option out for this model."
            )


def model_ranks(
    model: Any, modules: Sequence[Any], *, window: int | None, tp: tuple[int, int]
) -> Ranks:
    """What the pools of a rank do not say, of SGLang's model configuration and the model's modules.
    `tp`: the rank's place in attention's tensor parallelism, and its size.
    """
    text = model.hf_text_config
    slides = [m for m in modules if getattr(m, "sliding_window_size", -1) > -1]
    return Ranks(
        tp_rank=tp[0],
        tp_size=tp[1],
        total_kv_heads=model.get_total_num_kv_heads(),
        window=window,
        groups=int(getattr(text, "n_groups", 0) or getattr(text, "mamba_n_groups", 0)),
        sliding={getattr(module, "layer_id", None) for module in slides},
    )


def draft_runners(scheduler: Any) -> list[Any]:
    """SGLang's model runners of what drafts, one for each MTP module; of prefill's pipeline stages
    the last one has them. Its queues know the first one's pool only.
    """
    worker = scheduler.draft_worker
    return [] if worker is None else [runner for _, runner in worker.weight_update_runners()]


def draft_pools(scheduler: Any, runner: Any, target: Ranks) -> ModelPools:
    """The pools of a module. In windows whose pages its target allocates, it keeps what that one
    does; of heads it may have others, divided among other ranks.
    """
    heads = runner.model_config.get_total_num_kv_heads()
    ranks = replace(target, total_kv_heads=heads, sliding=())
    placement = getattr(scheduler.draft_worker, "draft_parallel_layout", None)  # since 0.5.23
    if placement is not None and (group := placement.tp_group) is not None:
        ranks = replace(ranks, tp_rank=group.rank_in_group, tp_size=group.world_size)
    return ModelPools(
        tokens=runner.token_to_kv_pool, ranks=ranks, requests=runner.req_to_token_pool
    )
