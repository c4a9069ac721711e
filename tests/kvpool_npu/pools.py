"""Small pools in Ascend's layouts, and the GPU pools that match them."""

from __future__ import annotations

from kvpool import MHA
from kvpool_npu import NPUMLA, NPUIndexKey, NPUMHAPool, NPUMLAPool, npu_order
from tests.pools import GDN, hybrid, small

npu_mha = small(NPUMHAPool, num_kv_heads=4, head_dim=8)
npu_mla = small(NPUMLAPool, kv_lora_rank=16, qk_rope_head_dim=8)
# index keys on layers 1 and 3
npu_nsa = npu_mla.but(index_head_dim=16, index_layers=(1, 3))
# what a GPU has in channels-first order
npu_hybrid = hybrid.but(linear=npu_order(GDN), full=MHA(4, 8, 16), placement="stack")
npu_hybrid_nsa = npu_hybrid.but(full=NPUMLA(16, 8), index=NPUIndexKey(16))

NPU = {
    "mha": npu_mha,
    "mha, v differs": npu_mha.but(v_head_dim=16),
    "mha fp8": npu_mha.but(packing="fp8"),
    "mla": npu_mla,
    "nsa": npu_nsa,
    "nsa fp8": npu_nsa.but(index_packing="fp8"),
    "nsa int8": npu_nsa.but(index_packing="int8"),
    "hybrid": npu_hybrid,
    "hybrid nsa": npu_hybrid_nsa,
    "hybrid nsa int8": npu_hybrid_nsa.but(index_packing="int8"),
}
