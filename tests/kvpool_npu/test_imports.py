"""Imports and error messages on machines without torch_npu or CANN."""

from __future__ import annotations

import os
from importlib.metadata import distributions
from pathlib import Path

import torch

from tests.kvpool_npu import wheel
from tests.processes import python

FORBIDDEN = """
import sys
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch_npu", "acl"}:
            raise ImportError(name + " is not there")
sys.meta_path.insert(0, Forbidden())
"""
ALL_OF_IT = """
import kvpool, disagg, kvpool_npu, kvpool_cuda, sys
assert not {"torch", "torch_npu", "kvpool_npu.device"} & set(sys.modules)
from kvpool import DeviceUnavailable, MLAPool
from kvpool.device import device_entries, get_device
assert {"cpu", "meta", "npu", "npu-reference"} <= set(device_entries())
kvpool_npu.NPUMLAPool(layers=[0], page_size=4, num_pages=3, packing="bf16").check_integrity()
kvpool_npu.NPUMHAPool(
    layers=[0], page_size=4, num_pages=3, packing="bf16", num_kv_heads=2, head_dim=8, device="meta"
).check_integrity()
for ask in (get_device, lambda name: MLAPool(layers=[0], page_size=4, num_pages=3, dtype="bf16",
            device=name)):
    try:
        ask("npu:0")
        raise SystemExit("npu:0 is available")
    except DeviceUnavailable as error:
        said = str(error)
assert said.startswith("device 'npu:0': missing: "), said
assert "torch_npu" not in sys.modules
print(said)
"""


def said(code: str, *paths: Path, **environment: str) -> str:
    """What a fresh interpreter prints, with `paths` first in its search path."""
    search = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    return python("-c", code, drop="ASCEND_HOME_PATH", **environment)


def test_everything_works_where_torch_npu_cannot_be_imported():
    found = said(FORBIDDEN + ALL_OF_IT)
    assert "/dev/davinci_manager" in found and "CANN" in found and "kvpool[npu]" in found


if wheel.folder():

    def test_torch_npu_without_cann_is_not_imported():
        """The variable is needed because torch would load it, and `import torch` would fail."""
        place = wheel.folder().parent
        found = said(ALL_OF_IT, place, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert "CANN" in found and "/dev/davinci_manager" in found
        assert "kvpool[npu]" not in found
        [package] = distributions(name="torch-npu", path=[str(place)])
        another = package.version.split(".")[:2] != torch.__version__.split(".")[:2]
        assert ("is installed)" in found) == another

    def test_torch_does_not_load_it_without_cann():
        """Where torch finds it, `import torch` fails; so tests keep it in its own folder."""
        code = "try:\n    import torch\nexcept RuntimeError as e:\n    print(e)\n"
        assert "torch_npu" in said(code, wheel.folder().parent)
