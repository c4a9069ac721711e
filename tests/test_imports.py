"""What importing a package may cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import disagg
import kvpool
import kvpool_npu
from tests.processes import python

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name + " is not there", name=name)
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize(
    "module",
    [
        "kvpool.describe",
        "kvpool.device",
        "kvpool.allocation.allocator",
        "kvpool.models.sizing",
        "kvpool.pools.typed",
        "disagg.plan",
        "disagg.testing.arena",
    ],
)
def test_layouts_and_plans_need_no_torch(module):
    python("-c", BLOCKED.format(blocked={"torch"}) + f"import {module}")


@pytest.mark.parametrize("package", ["kvpool", "disagg", "kvpool_cuda", "kvpool_npu"])
def test_packages_import_no_vendor_package(package):
    vendors = {"torch_npu", "triton", "mooncake", "nixl", "nixl_cu12", "transformers"}
    python("-c", BLOCKED.format(blocked=vendors) + f"import {package}")


@pytest.mark.parametrize("package", [kvpool, disagg, kvpool_npu])
def test_every_exported_name_loads_and_is_listed(package):
    assert {*package.__all__} <= {*dir(package)}
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("option", "blocked"), [("--version", {"torch", "numpy", "disagg"}), ("--help", {"torch"})]
)
def test_a_command_imports_only_what_it_needs(option, blocked):
    code = f"""{BLOCKED.format(blocked=blocked)}
import runpy
sys.argv = ["kvpool", {option!r}]
try:
    runpy.run_module("kvpool", run_name="__main__")
except SystemExit as done:
    assert not done.code
"""
    python("-c", code)


@pytest.mark.parametrize(
    "arguments",
    [
        ["budget", "deepseek_v4", "--dtype", "fp8", "--draft", "--tp", "2", "--block-pool"],
        ["describe", "deepseek_v4", "--packing", "fp8", "--html", "map.html"],
        ["explain", "qwen3_next_80b", "--tp", "2:1", "--page-size", "64:16"],
        ["doctor"],
    ],
)
def test_sizes_and_layouts_of_configs_are_the_same_without_torch(arguments, tmp_path):
    code = """
from kvpool.__main__ import main
sys.argv = ["kvpool", *{arguments!r}]
main()
"""
    said = []
    for blocked in ({"torch", "transformers"}, set()):
        program = BLOCKED.format(blocked=blocked) + code.format(arguments=arguments)
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    if arguments == ["doctor"]:
        assert "cpu            not here  needs PyTorch: pip install 'kvpool[torch]'" in said[0]
    else:
        assert said[0] and said[0] == said[1]


@pytest.mark.parametrize(
    ("package", "arguments", "sentence"),
    [
        ("typer", ["--version"], "kvpool --version needs typer: pip install 'kvpool[cli]'"),
        ("torch", ["bench"], "needs PyTorch: pip install 'kvpool[torch]'"),
    ],
)
def test_a_command_says_which_extra_it_needs(package, arguments, sentence):
    code = f"""{BLOCKED.format(blocked={package})}
from kvpool.__main__ import main
sys.argv = ["kvpool", *{arguments!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.endswith(f"{sentence}\n") and done.stderr.count("\n") == 1
