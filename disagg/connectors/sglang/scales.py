"""What SGLang's attention scales keys and values by: `RadixAttention.k_scale` and `v_scale`, of the
checkpoint or of `--quantization-param-path`; of NVFP4, what its quantisation made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from disagg.connectors.scales import LayerScale


def rank_scales(runners: Sequence[Any]) -> Iterator[LayerScale]:
    """Of a rank's model runners: the target's, then those of its draft's modules, whose layers are
    numbered from 0 on, module by module.
    """
    layers = 0
    for number, runner in enumerate(runners):
        modules = [m for m in runner.model.modules() if hasattr(m, "k_scale") and _layer(m)]
        ids = sorted({module.layer_id for module in modules})
        for module in modules:
            owner, layer = "target", module.layer_id
            if number:
                owner, layer = "draft", layers + ids.index(layer)
            for role, value in zip("kv", _scales(runner.token_to_kv_pool, module)):
                yield LayerScale(owner=owner, layer=layer, role=role, value=value)
        layers += len(ids) if number else 0


def _layer(module: Any) -> bool:
    return isinstance(getattr(module, "layer_id", None), int)


def _scales(pool: Any, module: Any) -> tuple[Any, Any]:
    method = getattr(pool, "quant_method", None)
    if method is not None and method.needs_global_scale():
        key, value = method.get_bmm_scales(module.layer_id)
        return key, value
    return module.k_scale, module.v_scale
