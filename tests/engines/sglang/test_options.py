"""What SGLang's options mean for the backend: taken, or refused by name, by SGLang's own check of
its server arguments or by our manager, which is made as SGLang makes it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import sglang
from sglang.srt import runtime_context
from sglang.srt.disaggregation import decode, role_switch
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    TransferBackend,
    setup_state_kv_args,
)
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.server_args import ServerArgs

from disagg.connectors.sglang import register
from disagg.connectors.sglang.conventions import index_keys
from disagg.connectors.sglang.manager import KvpoolManager, refuse_windows
from disagg.connectors.sglang.pools import engine_layout
from disagg.connectors.sglang.states import Ranks
from disagg.contract import read_contract
from tests.engines.sglang import sides

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 512,
    "dtype": "bfloat16",
}  # fmt: skip
GLM5 = {
    **LLAMA, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
    "num_hidden_layers": 6, "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 64, "index_head_dim": 128, "index_n_heads": 4,
    "index_topk": 64, "index_topk_pattern": "FSSFSS", "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 6,
    "num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True,
}  # fmt: skip
CP = {"tp_size": 2, "attn_cp_size": 2, "enable_prefill_cp": True, "cp_strategy": "interleave"}
POLICY = {"disaggregation_decode_allocation_policy": "prefill_complete"}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))  # of DSA's checks
    register()


@pytest.fixture
def resolved(tmp_path):
    """SGLang's server arguments, as it resolves and checks them."""

    def make(mode, config=LLAMA, **options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        args = ServerArgs(
            model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True,
            disaggregation_mode=mode, disaggregation_transfer_backend="kvpool", **options,
        )  # fmt: skip
        args.resolve_once()
        return args

    return make


@pytest.mark.parametrize(
    ("mode", "config", "options", "words"),
    [
        ("prefill", LLAMA, POLICY, "prefill_complete does not yet support transfer backends other"),
        ("decode", LLAMA, POLICY, "prefill_complete does not yet support transfer backends other"),
        ("decode", LLAMA, {"tp_size": 2, "dcp_size": 2}, "PD decode DCP requires .*mooncake, nixl"),
        ("prefill", GLM5, {"tp_size": 2, "dcp_size": 2}, "DSA DCP does not support PD"),
        (
            "prefill",
            LLAMA,
            {**CP, "enable_kv_cache_sharding": True, "attention_backend": "fa3", "page_size": 64},
            "enable-kv-cache-sharding currently only supports the mooncake and nixl",
        ),
        (
            "prefill",
            GLM5,
            {**CP, "enable_dsa_cache_layer_split": True},
            "enable-dsa-cache-layer-split currently only supports the mooncake",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sglang_takes_its_own_backends_only(mode, config, options, words, resolved):
    with pytest.raises(ValueError, match=words):
        resolved(mode, config, **options)


@contextmanager
def manager(args, pool=None, rank=0):
    """Our manager in SGLang's context for these arguments, made but not started."""
    place = runtime_context.SpawnRanks(world_rank=rank, gpu_id=0, dp_rank=None)
    context = runtime_context.create_context(args, role="scheduler", ranks=place)
    with ExitStack() as stack:
        stack.enter_context(runtime_context.use_context(context))
        stack.enter_context(runtime_context.get_parallel().override(pp_group=None))
        known = KVArgs()
        known.kv_item_lens, known.kv_layout, known.kv_cache_dtype_str = [], None, "auto"
        known.pp_rank = known.system_dp_rank = 0
        setup_state_kv_args(known, sides.mha() if pool is None else pool, None, 8)
        made = KvpoolManager(known, DisaggregationMode(args.disaggregation_mode), args)
        stack.callback(made.server_socket.close, 0)
        yield made


def start(made, **scheduler):
    made.start(SimpleNamespace(scheduler=SimpleNamespace(**scheduler)))


@pytest.mark.parametrize(
    ("mode", "options", "scheduler", "words"),
    [
        ("prefill", {"tp_size": 2, "dcp_size": 2}, {}, "dcp_size 2 on prefill: .* Use 1."),
        ("prefill", {"enable_memory_saver": True}, {}, "enable_memory_saver. Use memory that"),
        ("decode", {}, {"enable_hisparse": True}, "enable_hisparse. Use the device's pool."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_our_manager_refuses_by_name(mode, options, scheduler, words, resolved):
    refused = pytest.raises(ValueError, match=f"backend kvpool does not know {words}")
    with manager(resolved(mode, **options)) as made, refused:
        start(made, **scheduler)


@pytest.mark.parametrize(("pool", "refused"), [("mha", False), ("swa", True)])
def test_windows_are_not_kept_for_shorter_prefixes(pool, refused):
    ranks, kinds = Ranks(total_kv_heads=4, window=20), ["swa"] if refused else []
    made = engine_layout(getattr(sides, pool)(), ranks, state_types=kinds, total_layers=4)
    says = pytest.raises(ValueError, match="radix_cache: space swa has a window")
    with says if refused else nullcontext():
        refuse_windows(made.layout)


@pytest.mark.parametrize(
    ("options", "rank", "replica", "number"),
    [
        ({}, 0, 0, 0),
        ({"tp_size": 4}, 3, 0, 3),
        ({"tp_size": 2}, 1, 1, 3),
        ({"tp_size": 2}, 0, 2, 4),
        # SGLang calls a group of attention's data parallelism a replica too
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 1, 0, 1),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 2, 1, 2),
    ],
)
def test_each_rank_of_an_engine_has_a_number_of_its_own(options, rank, replica, number, resolved):
    with manager(resolved("prefill", **options), rank=rank) as made:
        made.system_dp_rank = replica
        assert made.number == number


def test_deferred_release_is_taken_and_its_absence_refused(resolved, monkeypatch):
    with manager(resolved("decode")) as made:
        assert made.enable_deferred_decode_kv_release
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")
    refused = pytest.raises(ValueError, match="DECODE_KV_RELEASE=0: pages of an aborted")
    with manager(resolved("decode")) as made, refused:
        start(made)


def test_decode_of_a_hybrid_with_latents_starts(resolved, monkeypatch):
    """For such a pool SGLang's decode asks all CP ranks of prefill, also where there is one. It
    says what it is where that is asked for.
    """
    monkeypatch.setenv("KVPOOL_SGLANG", json.dumps({"contract": "127.0.0.1:*"}))
    with sides.alone():
        pool = sides.hybrid(kind="kda", full="mla")
    model = SimpleNamespace(
        hf_text_config=LLAMA, get_total_num_kv_heads=lambda: 4, num_hidden_layers=8,
        model_path="/models/tiny", quantization=None,
    )  # fmt: skip
    runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: iter(())))
    scheduler = SimpleNamespace(
        model_config=model, tp_worker=SimpleNamespace(model_runner=runner),
        sliding_window_size=None, req_to_token_pool=None, draft_worker=None,
        spec_algorithm=SimpleNamespace(carries_draft_hidden_states=lambda: False),
    )  # fmt: skip
    queue = SimpleNamespace(
        scheduler=scheduler, token_to_kv_pool=pool, draft_token_to_kv_pool=None,
        transfer_queue=SimpleNamespace(metadata_buffers=None),
    )  # fmt: skip
    with manager(resolved("decode"), pool) as made:
        assert made.is_hybrid_mla_backend
        made.start(queue)
        with made.contract as server:
            contract = read_contract(f"http://{server.address}")
        made.rank.close()
        assert (contract.serves, contract.missing) == (("decode",), [])
        assert contract.versions["sglang"] == sglang.__version__
        (rank,) = contract.ranks
        assert rank.layout.fingerprint() == made.layout.layout.fingerprint()
        assert not made.drafts
        assert {"latent", "temporal"} <= {region.role for region in made.layout.layout.regions}


@pytest.mark.parametrize("rank", [0, 1])
def test_of_prefills_cp_ranks_the_first_sends(rank, resolved, monkeypatch):
    """Each has all of the state, also where SGLang would have each send a part."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "1")
    with sides.alone():
        pool = sides.hybrid(full="mla")
    with manager(resolved("prefill", **CP), pool, rank) as made:
        assert made.is_dummy_cp_rank == (rank == 1)
        assert not made.enable_all_cp_ranks_for_transfer


def test_role_switches_are_taken_by_sglang(resolved):
    args = resolved("decode", enable_pd_role_switch=True)
    with manager(args) as made:
        scheduler = SimpleNamespace(
            server_args=args,
            disaggregation_mode=made.disaggregation_mode,
            disagg_decode_prealloc_queue=SimpleNamespace(kv_manager=made),
            _pd_role_switch_unhealthy=False,
            _pd_role_switch_in_progress=False,
        )
        assert role_switch._reject_reason(scheduler, "prefill") is None


def test_host_memory_of_decode_is_refused_by_sglang(resolved, monkeypatch):
    """Its queue asks the manager that it has made."""
    pool = sides.mha()
    held = pool.get_contiguous_buf_infos()
    group = SimpleNamespace(
        get_pool=lambda _: SimpleNamespace(logical_size=1 << 20),
        get_contiguous_buf_infos=lambda _: (held, held),
    )
    runner = SimpleNamespace(kv_cache_dtype_str="auto")
    queue = SimpleNamespace(
        transfer_backend=TransferBackend("kvpool"), tp_rank=0, pp_rank=0, token_to_kv_pool=pool,
        draft_token_to_kv_pool=None, is_mla_backend=False, enable_staging=False,
        tree_cache=SimpleNamespace(host_pool_group=group, sidecar_pool_specs=[]),
        metadata_buffers=SimpleNamespace(get_buf_infos=lambda: ([], [], [])),
        req_to_token_pool=SimpleNamespace(max_context_len=512),
        scheduler=SimpleNamespace(
            enable_hisparse=False, tp_worker=SimpleNamespace(model_runner=runner),
            model_config=SimpleNamespace(num_hidden_layers=4), server_args=None,
        ),
    )  # fmt: skip
    managers = []

    def made(*given):
        managers.append(KvpoolManager(*given))
        return managers[-1]

    classes = {KVClassType.KVARGS: KVArgs, KVClassType.MANAGER: made}
    monkeypatch.setattr(decode, "get_kv_class", lambda _, kind: classes[kind])
    args = resolved("decode", disaggregation_decode_host_receive_threshold=0.5)
    refused = pytest.raises(ValueError, match="does not support decode host KV destinations")
    with manager(args), refused:
        decode.DecodePreallocQueue._init_kv_manager(queue)
    (refusing,) = managers
    refusing.server_socket.close(0)  # its context would wait for it when the process ends


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("writer", [False, True])
def test_index_keys_are_said_to_be_turned_where_sglang_turns_them(fused, writer, monkeypatch):
    """GLM-5's, whose rope is interleaved, are written by a fused kernel that turns none."""
    monkeypatch.setattr(dsa_indexer, "rotate_activation", lambda keys: f"{keys}, turned")
    indexer = SimpleNamespace(use_dsa_indexer_fusion=fused, use_aiter_fused_fp8_writer=writer)
    turned = dsa_indexer.Indexer._maybe_rotate(indexer, "keys") == "keys, turned"
    assert index_keys([object(), indexer]) == ("hadamard" if turned else "plain")


def test_a_stage_without_indexers_says_nothing_of_index_keys():
    assert index_keys([object()]) is None
    assert index_keys([SimpleNamespace(is_in_indexer=True)]) == "hadamard"  # DeepSeek-V4's
