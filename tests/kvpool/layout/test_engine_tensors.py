"""docs/tensors.md: each row's tensor, filled by its engine's own indexing, moves into each other
row that holds the same state.
"""

from __future__ import annotations

import ctypes
import re
from itertools import permutations
from pathlib import Path

import pytest
import torch

from disagg.connectors.linear_states import states
from disagg.plan import plan
from kvpool import describe as described
from kvpool.item import Cell, Repeat, Seq
from kvpool.layout import PoolLayout, RequestAddress, Space, Span

PAGE = Path(__file__).parents[3] / "docs" / "tensors.md"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| `(\[.+?\])` ?(\w*) \| `(.+)` \|$", re.M)
CALLS = {name: getattr(described, name) for name in described.__all__}
CALLS |= {"Cell": Cell, "Repeat": Repeat, "Seq": Seq, "states": states, "range": range}
LAYERS, HEADS, DIM, TOKENS, PAGES = 2, 2, 8, 11, 7
STATES = ("K and V", "latent and rope, fp8", "latent and rope", "index keys", "gated delta net")


def named(state):
    """Which state a row holds, in any form."""
    return next(name for name in STATES if state.startswith(name))


def forms():
    """The rows of each engine and state."""
    found: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        engine = section.split()[0]
        for state, _, shape, dtype, call in ROW.findall(section):
            found.setdefault((engine, state), []).append((shape, dtype or "bfloat16", call))
    return found


def keys_then_scales(page, entry, tokens):
    """Of a page's bytes: those of all keys, then those of all scales."""
    at = tokens * 128 + 4 * entry
    return {"index_key": page[128 * entry :][:128], "index_key.scale": page[at : at + 4]}


def fp8_row(row):
    return {"latent": row[:512], "latent.scale": row[512:528], "rope": row[528:]}


def delta_net(slot):
    """Of a slot's bytes: conv `[tap, channel]`, then the temporal state."""
    conv = slot[: 3 * 96 * 2].view(torch.bfloat16).view(3, 96)
    return {**sections(conv.T), "temporal": slot[3 * 96 * 2 :].view(torch.float32).view(4, 16, 8)}


def sections(conv):
    return {"conv.q": conv[:16], "conv.k": conv[16:32], "conv.v": conv[32:]}


# by engine and state, from tensors `t` of a layer: what token n of page b is, as the engine indexes
WHERE = {
    ("vLLM", "K and V"): lambda t, b, n: {"k": t[0][b, :, n, :DIM], "v": t[0][b, :, n, DIM:]},
    ("vLLM", "K and V, planes"): lambda t, b, n: {
        "k": t[0][b, 0, n].view(HEADS, DIM),
        "v": t[0][b, 1, n].view(HEADS, DIM),
    },
    ("vLLM", "K and V, transposed K"): lambda t, b, n: {
        "k": t[0][b].view(HEADS, 2, -1)[:, 0].view(HEADS, DIM, -1)[:, :, n],
        "v": t[0][b].view(HEADS, 2, -1)[:, 1].view(HEADS, -1, DIM)[:, n],
    },
    ("vLLM", "latent and rope"): lambda t, b, n: {
        "latent": t[0][b, 0, n, :512],
        "rope": t[0][b, 0, n, 512:],
    },
    ("vLLM", "latent and rope, fp8"): lambda t, b, n: fp8_row(t[0][b, 0, n]),
    ("vLLM", "index keys"): lambda t, b, n: keys_then_scales(t[0][b].flatten(), n, t[0].shape[2]),
    ("vLLM", "gated delta net"): lambda t, b, n: delta_net(t[0][b].flatten()),
    ("SGLang", "K and V"): lambda t, b, n: {
        role: held[b * (len(held) // PAGES) + n] for role, held in zip("kv", t)
    },
    ("SGLang", "K and V, hnd"): lambda t, b, n: {
        role: held[b, :, n] for role, held in zip("kv", t)
    },
    ("SGLang", "K and V, NPU"): lambda t, b, n: {role: held[b, n] for role, held in zip("kv", t)},
    ("SGLang", "latent and rope"): lambda t, b, n: {
        "latent": t[0][b * (len(t[0]) // PAGES) + n, 0, :512],
        "rope": t[0][b * (len(t[0]) // PAGES) + n, 0, 512:],
    },
    ("SGLang", "latent and rope, NPU"): lambda t, b, n: {
        "latent": t[0][b, n, 0],
        "rope": t[1][b, n, 0],
    },
    ("SGLang", "latent and rope, fp8"): lambda t, b, n: fp8_row(
        t[0][b * (len(t[0]) // PAGES) + n, 0]
    ),
    ("SGLang", "index keys"): lambda t, b, n: keys_then_scales(t[0][b], n, t[0].shape[1] // 132),
    ("SGLang", "gated delta net"): lambda t, b, n: {**sections(t[0][b]), "temporal": t[1][b]},
    ("TensorRT-LLM", "K and V"): lambda t, b, n: {"k": t[0][b, 0, n], "v": t[0][b, 1, n]},
    ("TensorRT-LLM", "K and V, hnd"): lambda t, b, n: {
        "k": t[0][b, 0, :, n],
        "v": t[0][b, 1, :, n],
    },
    ("TensorRT-LLM", "latent and rope"): lambda t, b, n: {
        "latent": t[0][b, 0, n, 0, :512],
        "rope": t[0][b, 0, n, 0, 512:],
    },
    ("TensorRT-LLM", "index keys"): lambda t, b, n: keys_then_scales(
        t[0][b].flatten(), n, t[0].shape[1]
    ),
    ("vllm-ascend", "K and V"): lambda t, b, n: {"k": t[0][b, n], "v": t[1][b, n]},
    ("vllm-ascend", "latent and rope"): lambda t, b, n: {
        "latent": t[0][b, n, 0],
        "rope": t[1][b, n, 0],
    },
    ("vllm-ascend", "index keys, fp8 (A5)"): lambda t, b, n: {
        "index_key": t[0][b, n, 0],
        "index_key.scale": t[1][b, n, 0],
    },
}


class Side:
    """An engine's tensors of two layers, as the page describes them."""

    def __init__(self, form, tokens):
        sizes = {"B": PAGES, "N": tokens, "T": PAGES * tokens, "S": PAGES, "L": LAYERS}
        sizes |= {"H": HEADS, "D": DIM}
        self.form, self.tokens, self.layers = form, tokens, [[] for _ in range(LAYERS)]
        parts = []
        for shape, dtype, call in forms()[form]:
            size = eval(shape, sizes)
            for role in "kv" if "role=role" in call else " ":
                held = self.memory(form, [LAYERS, *size] if "L" not in shape else size, dtype)
                for layer in range(LAYERS):
                    self.layers[layer].append(held[layer])
                    if "L" not in shape:
                        names = {"t": held[layer], "l": layer, "role": role}
                        parts.append(eval(call, CALLS | sizes | names))
                if "L" in shape:
                    parts.append(eval(call, CALLS | sizes | {"t": held, "role": role}))
        space = Space("kv", entries_per_item=tokens)
        if self.slots:
            space = Space("state", "slot")
        self.layout = PoolLayout.of(*parts, spaces=[space])

    @staticmethod
    def memory(form, shape, dtype):
        if form[0] == "TensorRT-LLM":  # the layers of a page side by side
            layers, pages, *rest = shape
            return torch.zeros(pages, layers, *rest, dtype=getattr(torch, dtype)).transpose(0, 1)
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    @property
    def slots(self):
        return self.form[1] == "gated delta net"

    def table(self, ids):
        if self.slots:
            return RequestAddress(TOKENS, {"state": Span(ids[:1])})
        return RequestAddress(TOKENS, {"kv": Span(ids[: -(-TOKENS // self.tokens)])})

    def elements(self, ids):
        """What every token of every layer is: `(layer, token, role)` to a view."""
        count = 1 if self.slots else TOKENS
        return {
            (layer, token, role): view
            for layer, held in enumerate(self.layers)
            for token in range(count)
            for role, view in WHERE[self.form](
                held, ids[token // self.tokens], token % self.tokens
            ).items()
        }


def raw(view):
    return view.contiguous().view(torch.uint8)


def test_every_row_of_the_page_is_tested():
    assert set(forms()) == set(WHERE)
    assert sum(len(rows) for rows in forms().values()) == PAGE.read_text().count("\n| ") - 4


@pytest.mark.parametrize("state", STATES)
def test_a_state_moves_between_all_engines_that_have_it(state):
    alike = [form for form in WHERE if named(form[1]) == state]
    assert len(alike) > 1
    for number, (one, other) in enumerate(permutations(alike, 2)):
        source, dest = Side(one, 4), Side(other, 6)
        there, here = [3, 1, 6], [5, 2, 4]
        torch.manual_seed(number)
        sent = {}
        for key, view in source.elements(there).items():
            drawn = torch.randint(256, raw(view).shape, dtype=torch.uint8)
            view.copy_(drawn.view(view.dtype).view(view.shape))
            sent[key] = drawn
        (batch,) = plan([source.layout], dest.layout).bind_all(
            [source.table(there)], dest.table(here)
        )
        for src, dst, nbytes in zip(batch.src.tolist(), batch.dst.tolist(), batch.nbytes.tolist()):
            ctypes.memmove(dst, src, nbytes)
        for key, view in dest.elements(here).items():
            assert torch.equal(raw(view).flatten(), sent[key].flatten()), (one, other, key)
