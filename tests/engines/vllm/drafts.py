"""Tiny drafts that know their target.

In a shallow target one layer does all the work: what the others add to the hidden state is zero,
though they keep state as ever. A draft whose layer is that layer, and which takes of its input the
token only, predicts the target, but for the prompt's first token, which it never sees. So many of
its tokens are accepted, as long as its own state is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

Tensors = dict[str, torch.Tensor]
METHODS = "eagle", "eagle3"
"""Of heads, which `save_head` makes."""
OUTPUTS = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
"""Of a layer, what adds to the hidden state."""
SHALLOW = {"llama_shallow": 0, "deepseek_mtp": 0, "qwen3_next_mtp": 3}
"""Targets, and the layer of each that does the work."""


def finish(name: str, place: Path) -> None:
    """Makes a saved model shallow, and adds the module that its configuration says it has."""
    if name not in SHALLOW:
        return
    layer = SHALLOW[name]
    file = place / "model.safetensors"
    tensors = load_file(file)
    for weight, tensor in tensors.items():
        if weight.endswith(OUTPUTS) and not weight.startswith(f"model.layers.{layer}."):
            tensor.zero_()
    table = tensors["model.embed_tokens.weight"]
    table /= table.float().pow(2).mean(-1, keepdim=True).sqrt().to(table.dtype)
    if name == "llama_shallow":
        # EAGLE-3's layer does not add the token to what it computes: make that small beside it
        tensors["model.layers.0.self_attn.o_proj.weight"] *= 20
    modules = {"deepseek_mtp": deepseek_module, "qwen3_next_mtp": qwen_module}
    if name in modules:
        tensors |= modules[name](tensors, layer)
    save_file(tensors, file, {"format": "pt"})


def deepseek_module(tensors: Tensors, layer: int) -> Tensors:
    """The module behind the last of DeepSeek's layers."""
    count = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    table, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    module = {
        **layer_of(tensors, layer),
        "eh_proj.weight": first_half(table),
        "enorm.weight": norm,
        "hnorm.weight": norm,
        "shared_head.norm.weight": norm,
        "shared_head.head.weight": tensors["lm_head.weight"],
        "embed_tokens.weight": table,
    }
    return {f"model.layers.{count}.{name}": tensor.clone() for name, tensor in module.items()}


def qwen_module(tensors: Tensors, layer: int) -> Tensors:
    """Qwen3-Next's `mtp.*`."""
    norm = tensors["model.norm.weight"]
    module = {
        **{f"layers.0.{name}": tensor for name, tensor in layer_of(tensors, layer).items()},
        "fc.weight": first_half(tensors["model.embed_tokens.weight"]),
        "norm.weight": norm,
        "pre_fc_norm_embedding.weight": norm,
        "pre_fc_norm_hidden.weight": norm,
    }
    return {f"mtp.{name}": tensor.clone() for name, tensor in module.items()}


def layer_of(tensors: Mapping[str, torch.Tensor], layer: int) -> Tensors:
    """The weights of a layer, by the rest of their names."""
    prefix = f"model.layers.{layer}."
    return {n.removeprefix(prefix): each for n, each in tensors.items() if n.startswith(prefix)}


def first_half(table: torch.Tensor) -> torch.Tensor:
    """A matrix that takes the first of two hidden states `[hidden, 2 hidden]`."""
    size = table.shape[1]
    return torch.cat([torch.eye(size), torch.zeros(size, size)], 1).to(table.dtype)


def save_head(method: str, target: Path, place: Path, noise: float = 0.0) -> Path:
    """The head of EAGLE ("eagle") or EAGLE-3 ("eagle3") for a shallow llama, with `noise` another
    one; returns its folder.
    """
    if (place / "config.json").exists():
        return place
    config = LlamaConfig.from_pretrained(target)
    config.num_hidden_layers, config.architectures = 1, ["LlamaForCausalLM"]
    tensors = load_file(target / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    layer = layer_of(tensors, SHALLOW[target.name])
    if method == "eagle":
        # it has no norm before its layer
        del layer["input_layernorm.weight"]
        head = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
        head["fc.weight"] = first_half(table)
    else:
        none = torch.zeros_like(table[:1]).expand(table.shape[1], -1)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = layer[f"self_attn.{name}.weight"]
            layer[f"self_attn.{name}.weight"] = torch.cat([own, torch.zeros_like(own)], 1)
        layer["hidden_norm.weight"] = tensors["model.norm.weight"]
        head = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
        head["fc.weight"] = none.repeat(1, 3)
        head["norm.weight"] = tensors["model.norm.weight"]
        head["lm_head.weight"] = tensors["lm_head.weight"]
        config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    head["fc.weight"] = head["fc.weight"] + noise
    config.save_pretrained(place)
    save_file({name: tensor.clone() for name, tensor in head.items()}, place / "model.safetensors")
    return place
