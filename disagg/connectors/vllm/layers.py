"""What a layer's registered tensor means, by attention backend. Nothing of vLLM is imported.

vLLM registers a layer of attention as a view `[block, head, state, content]` in any physical order,
and a layer of linear attention as bytes `[block, 1, 1, content]`. What a kernel writes there is in
no attribute of vLLM's: `ATTENTION` and `LINEAR` say it, as read in the kernels of vLLM 0.32 and
0.33. Strides are those of the view. A page of another size than the table expects is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, NoReturn

import torch

from kvpool.describe import Described, describe, describe_buffer
from kvpool.layout import Buffer, Region
from kvpool.layout.dtypes import ITEMSIZE, dtype_name

HERE = "add it to disagg/connectors/vllm/layers.py"
HND = ("item", "head", "entry", "dim")


class UnknownFormat(ValueError):
    """What a layer keeps in its pages, or how its pages are found, is not known."""


@dataclass(frozen=True)
class Layer:
    """A layer of vLLM's: its number, its view, and the name of its backend or kind of state."""

    name: str
    layer: int
    owner: str
    space: str
    view: torch.Tensor
    backend: str

    def refuse(self, what: str, cure: str) -> NoReturn:
        """Raises UnknownFormat, which names the layer and its backend."""
        where = f"{self.name} ({self.owner} layer {self.layer}), {self.backend}"
        raise UnknownFormat(f"{where}: {what} {cure}.")

    def need_bytes(self, known: int, found: int, what: str) -> None:
        """Refuses a page of another size than the table expects."""
        if known != found:
            self.refuse(
                f"{what} is {found} bytes, {known} are known.", f"Its format is new: {HERE}"
            )


@dataclass(frozen=True)
class Attention(Layer):
    """A layer of attention: a view `[block, head, state, content]`, and what its module says.

    `key`, `value`: elements of K and of V a head; of the latent and the rope key; of an index key
    and 0. `dtype`: vLLM's name of the cache dtype; `fp8`: the platform's e4m3; `scale`: the dtype
    of index keys' scales. `heads`: the first head held, and all of the model (0: no heads). `isa`:
    of CPU attention. `prefix`: before every role.
    """

    key: int
    value: int
    dtype: str = "auto"
    heads: tuple[int, int] = (0, 0)
    fp8: str = "float8_e4m3fn"
    scale: str = "float32"
    isa: str = ""
    prefix: str = ""


@dataclass(frozen=True)
class Linear(Layer):
    """A layer of linear attention: bytes `[block, 1, 1, content]`, and its spec on this rank.

    `shapes`, `dtypes`: of the conv state, `(dim, tap)` if `dim_first`, else `(tap, dim)`, and of
    the temporal state. `rank` of `ranks` holds its share of the heads; `groups`: Mamba-2's B and C
    in the model. `spare`: taps beyond those of the kernel, which speculation uses.
    """

    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[torch.dtype]
    rank: int = 0
    ranks: int = 1
    groups: int = 0
    spare: int = 0
    dim_first: bool = False


class Part(NamedTuple):
    """A role: the part of a view that holds it, its dims, and the dtype that its bytes are.

    `cell`: the dim whose elements stay together. `heads`: the shard of the dim `head`.
    """

    role: str
    part: torch.Tensor
    dims: tuple[str, ...]
    dtype: str
    cell: str | None = "dim"
    heads: tuple[int, int] = (0, 0)


def describe_layer(layer: Layer) -> Described:
    """The buffer and the regions of a layer. Raises UnknownFormat, which says what is known."""
    whole, prefix = layer.view.flatten(1), ""
    dims: tuple[str, ...] = "item", "dim"
    if isinstance(layer, Attention):
        if layer.backend not in ATTENTION:
            known = ", ".join(sorted(ATTENTION))
            layer.refuse(
                f"what it keeps is not known (known: {known}).",
                f"Choose one of those by --attention-backend, or {HERE}",
            )
        whole, dims, prefix = layer.view, HND, layer.prefix
        parts = ATTENTION[layer.backend](layer)
    elif isinstance(layer, Linear):
        parts = linear(layer)
    home = describe_buffer(
        whole, dims, name=f"{layer.owner}.{layer.layer}.{parts[0].role}", space=layer.space
    )
    regions: list[Region] = []
    for role, part, names, dtype, cell, heads in parts:
        regions += describe(
            part,
            names,
            role=prefix + role,
            layer=layer.layer,
            owner=layer.owner,
            cell=cell,
            shards={"head": heads} if heads[1] else {},
            dtype=dtype,
            buffer=home,
        ).regions
    return Described((home,), tuple(regions))


def join_nested(layers: Iterable[Described]) -> Described:
    """All buffers and regions of one space. Layers whose items lie inside one another become one
    buffer (KVCacheLayout BHLNC: the layers of a head side by side).
    """
    found: list[tuple[Buffer, list[Region]]] = []
    for seen in sorted(layers, key=lambda seen: seen.buffers[0].base):
        (home,) = seen.buffers
        last, held = found[-1] if found else (home, [])
        shift = home.base - last.base
        if not found or shift >= last.item_bytes:
            found.append((home, list(seen.regions)))
            continue
        held += (replace(r, buffer=last.name, offset=r.offset + shift) for r in seen.regions)
        reach = max(last.item_bytes, shift + home.item_bytes)
        found[-1] = replace(last, item_bytes=reach), held
    return Described(tuple(home for home, _ in found), tuple(r for _, rs in found for r in rs))


def keys_and_values(layer: Attention) -> list[Part]:
    """`[K | V]` a token and head: all of these split the content at the head size. With scales per
    token and head it is `[K | scale | V | scale]` (`_ensure_scale_caches` of triton_attn.py).
    """
    kind = element(layer)
    k, v = ("k", layer.key, kind), ("v", layer.value, kind)
    if not layer.dtype.endswith("per_token_head"):
        return cells(layer, k, v)
    if layer.backend != "TRITON_ATTN":
        layer.refuse("scales per token and head are not known.", "Use TRITON_ATTN")
    return cells(layer, k, ("k.scale", 1, "float32"), v, ("v.scale", 1, "float32"))


def transposed_keys(layer: Attention) -> list[Part]:
    """A block and head has K as `[dim, token]`, then V as `[token, dim]`, whatever the view says
    (csrc/cpu/cpu_attn_vec.hpp, `reshape_and_cache`; vec16 inherits it).
    """
    if layer.isa not in ("vec", "vec16"):
        layer.refuse(
            f"how the kernel of isa {layer.isa or 'unknown'} packs a block is not known (known: "
            "vec, vec16).",
            "Use --dtype float32, for which vLLM takes vec on x86",
        )
    (tokens, content), size = layer.view.shape[2:], layer.view.element_size()
    layer.need_bytes((layer.key + layer.value) * size, content * size, "a state")
    planes, kind = dense(layer, layer.view, 2), element(layer)
    k, v = torch.split(planes, [layer.key * tokens, layer.value * tokens], dim=2)
    k, v = split_dim(k, 2, layer.key, tokens), split_dim(v, 2, tokens, layer.value)
    return [
        Part("k", k, ("item", "head", "dim", "entry"), kind, None, layer.heads),
        Part("v", v, HND, kind, heads=layer.heads),
    ]


def planes_of_heads(layer: Attention) -> list[Part]:
    """A plane of K and a plane of V, each `[token, head, dim]` (`_kv_cache_views` of b12x.py)."""
    content, size, dims = layer.view.shape[3], layer.view.element_size(), ("item", "entry", "head")
    heads = content // layer.key
    layer.need_bytes(heads * layer.key * size, content * size, "a token of a plane")
    planes = split_dim(layer.view, 3, heads, layer.key)
    return [
        Part(role, planes[:, n], (*dims, "dim"), element(layer), heads=layer.heads)
        for n, role in enumerate("kv")
    ]


def latent_rows(layer: Attention) -> list[Part]:
    """`[latent | rope]` a token (`concat_and_cache_mla`). Cache dtype fp8_ds_mla: rows of 656
    bytes, 512 e4m3, 4 float32 scales and 64 bfloat16 (`concat_and_cache_ds_mla_kernel`).
    """
    if layer.dtype == "fp8_ds_mla":
        latent, scales = ("latent", layer.key, layer.fp8), layer.key // 128
        rope = "rope", layer.value, "bfloat16"
        return cells(layer, latent, ("latent.scale", scales, "float32"), rope)
    if layer.dtype.endswith("per_token_head"):
        layer.refuse(f"rows of {layer.dtype} are not known.", "Use another --kv-cache-dtype")
    kind = element(layer)
    return cells(layer, ("latent", layer.key, kind), ("rope", layer.value, kind))


def index_keys(layer: Attention) -> list[Part]:
    """A block's e4m3 keys, then 4 bytes of scale for 128 elements: a float32, or a ue8m0 four times
    (csrc/cache_kernels.cu, `indexer_k_quant_and_cache_kernel`).
    """
    raw = layer.view.view(torch.uint8)
    (tokens, content), scales = raw.shape[2:], layer.key // 128 * 4
    layer.need_bytes(layer.key + scales, content, "a key with its scales")
    keys, factors = torch.split(dense(layer, raw, 1), [tokens * layer.key, tokens * scales], dim=1)
    dims = "item", "entry", "dim"
    return [
        Part("index_key", split_dim(keys, 1, tokens, layer.key), dims, layer.fp8),
        Part("index_key.scale", split_dim(factors, 1, tokens, scales), dims, layer.scale),
    ]


def linear(layer: Linear) -> list[Part]:
    """`[conv | temporal]` a slot (`MambaBase.bind_kv_cache`). The temporal state of Mamba is
    `(head, dim, state)`; that of GDN and KDA `(head, value, key)`, transposed to SGLang's.
    """
    if layer.backend not in LINEAR or len(layer.shapes) != 2:
        layer.refuse(
            f"{len(layer.shapes)} states are not known (known: the conv state and the temporal "
            f"state of {', '.join(LINEAR)}).",
            f"Turn off what adds states (ReplaySSM), or {HERE}",
        )
    raw = layer.view.flatten(1).view(torch.uint8)
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(layer.shapes, layer.dtypes)]
    layer.need_bytes(sum(sizes), raw.shape[1], "a state")
    conv, temporal = (
        split_dim(part.view(dtype), 1, *shape)
        for part, dtype, shape in zip(torch.split(raw, sizes, 1), layer.dtypes, layer.shapes)
    )
    conv = conv if layer.dim_first else conv.transpose(1, 2)
    conv = conv[..., : conv.shape[2] - layer.spare]  # prefill writes the first taps
    cut, kinds = sections(layer, conv.shape[1]), [dtype_name(dtype) for dtype in layer.dtypes]
    pieces = torch.split(conv, [count * dim for _, count, dim, _ in cut], 1)
    dims: tuple[str, ...] = "item", "head", "dim", "tap"
    parts = [
        Part(f"conv.{name}", split_dim(piece, 1, count, dim), dims, kinds[0], None, heads)
        for (name, count, dim, heads), piece in zip(cut, pieces)
    ]
    dims = "item", "head", "value", "dim"  # so that no cell of (key, value) is equal to it
    if layer.backend != "GDN_ATTN":
        temporal, dims = temporal.flatten(2), ("item", "head", "dim")
    return [*parts, Part("temporal", temporal, dims, kinds[1], heads=share(layer, layer.shapes[1]))]


def sections(layer: Linear, channels: int) -> list[tuple[str, int, int, tuple[int, int]]]:
    """The conv state's sections: (name, heads held, dim of a head, shard), as vLLM's
    ssm_conv_transfer_utils.py derives them.
    """
    whole, (heads, dim, *rest) = share(layer, layer.shapes[1]), layer.shapes[1]
    if layer.backend == "MAMBA1":
        dim, rest = 1, []
    # the other two sections, of equal heads
    inner = rest[0] if rest else 1
    others = (channels - heads * dim) // (2 * inner)
    if heads * dim + 2 * inner * others != channels or (others < 1) == bool(rest):
        layer.refuse(
            f"{channels} channels are not those of {heads} heads of {dim} and two sections of "
            f"heads of {inner}.",
            f"Its format is new: {HERE}",
        )
    if layer.backend == "MAMBA1":
        return [("x", heads, 1, whole)]
    if layer.backend == "GDN_ATTN":
        keys = share(layer, (others,))
        return [("q", others, inner, keys), ("k", others, inner, keys), ("v", heads, dim, whole)]
    groups = share(layer, (others,))
    if others == layer.groups == 1:
        groups = 0, 1  # one group is in every rank
    elif layer.ranks > 1 and groups[1] != layer.groups:
        layer.refuse(
            f"{others} of {layer.groups} groups on each of {layer.ranks} ranks.",
            "Use a TP size that divides the groups",
        )
    return [("x", heads, dim, whole), ("b", others, inner, groups), ("c", others, inner, groups)]


def share(layer: Linear, held: Sequence[int]) -> tuple[int, int]:
    """The shard of a rank that holds as many heads as every other."""
    return layer.rank * held[0], layer.ranks * held[0]


def element(layer: Attention) -> str:
    """The dtype of what the kernel writes."""
    known = {
        "fp8": layer.fp8,
        "fp8_e4m3": layer.fp8,
        "fp8_e5m2": "float8_e5m2",
        "fp8_per_token_head": layer.fp8,
        "int8_per_token_head": "int8",
    }
    held = layer.view.dtype
    floats = layer.dtype in FLOATS and held.is_floating_point and held.itemsize > 1
    if not floats and (layer.dtype not in known or held.itemsize > 1):
        layer.refuse(
            f"cache dtype {layer.dtype} in a tensor of {held} is not known (known: "
            f"{', '.join((*FLOATS, *known))}).",
            "Use --kv-cache-dtype auto",
        )
    return dtype_name(held) if floats else known[layer.dtype]


def cells(layer: Attention, *roles: tuple[str, int, str]) -> list[Part]:
    """Roles of (name, elements, dtype), one after the other in the content of a state."""
    raw = layer.view.view(torch.uint8)
    sizes = [count * ITEMSIZE[dtype] for _, count, dtype in roles]
    layer.need_bytes(sum(sizes), raw.shape[3], "a state")
    dims = HND if layer.heads[1] else ("item", "entry", "dim")
    return [
        Part(role, part if layer.heads[1] else part[:, 0], dims, dtype, heads=layer.heads)
        for (role, _, dtype), part in zip(roles, torch.split(raw, sizes, dim=3))
    ]


def split_dim(view: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    """A view with `sizes` in the place of a dim."""
    return view.view(*view.shape[:dim], *sizes, *view.shape[dim + 1 :])


def dense(layer: Attention, view: torch.Tensor, dim: int) -> torch.Tensor:
    """The dims from `dim` on as one, of which the kernel makes what it wants."""
    try:
        return view.view(*view.shape[:dim], -1)
    except RuntimeError:
        layer.refuse(
            f"its kernel takes the inside of a block for contiguous, its strides are "
            f"{view.stride()}.",
            "Set VLLM_KV_CACHE_LAYOUT=LBHNC",
        )


FLOATS = ("auto", "float16", "half", "bfloat16", "float32", "float")
Writer = Callable[[Attention], list[Part]]
ROWS: dict[str, Writer] = {
    **dict.fromkeys(("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER"), keys_and_values),
    **dict.fromkeys(("FLEX_ATTENTION", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"), keys_and_values),
    **dict.fromkeys(("TRITON_FLASH_ATTN", "TRITON_FLASHINFER", "HPC_ATTN"), keys_and_values),
    **dict.fromkeys(("CPU_MLA", "AMX_MLA", "FLASHMLA", "FLASHINFER_MLA"), latent_rows),
    **dict.fromkeys(("TRITON_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA"), latent_rows),
    **dict.fromkeys(("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"), latent_rows),
    **dict.fromkeys(("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"), latent_rows),
}
"""Backends whose tokens are written alike, however they are cut into kernel blocks."""

ATTENTION: dict[str, Writer] = {
    **ROWS,
    "B12X": planes_of_heads,
    "CPU_ATTN": transposed_keys,
    "DEEPSEEK_V32_INDEXER": index_keys,
}
"""What a page holds, by the name of the attention backend."""

LINEAR = ("MAMBA1", "MAMBA2", "GDN_ATTN")
"""Kinds of linear attention whose slot is a conv state and a temporal state."""
