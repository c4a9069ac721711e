"""What a packager builds and what a newcomer installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest

from kvpool.extras import EXTRAS, MissingExtra, install, missing
from tests.lowest import PYPROJECT, lowest, requirements, tomllib

ROOT = PYPROJECT.parent
PROJECT = tomllib.loads(PYPROJECT.read_text())["project"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

DIST = os.environ.get("KVPOOL_DIST")
"""Where a source distribution and a wheel are that are to be tested, in place of new ones."""
PACKAGES = ("kvpool", "kvpool_cuda", "kvpool_npu", "disagg")
NO_DATA = {".c", ".h", ".pyc", ".so"}  # what wheels leave out, and what checkouts are left with
MOST_COMPILED_BYTES = 400_000
NEW_TOO = ("--cached", "--others", "--exclude-standard")

SENTENCES = {
    "import kvpool; kvpool.declare('llama_3_1_70b').build(num_pages=4, dtype='bf16')": "device "
    "'cpu' needs PyTorch: pip install 'kvpool[torch]'",
    "from kvpool.device import get_device; get_device('cpu')": "device 'cpu' needs PyTorch: "
    "pip install 'kvpool[torch]'",
    "import kvpool.integrations.transformers": "kvpool.integrations needs PyTorch: "
    "pip install 'kvpool[torch]'",
    "from disagg.exporter import export; export({})": "the exporter needs prometheus-client: "
    "pip install 'kvpool[metrics]'",
    "from disagg import create_engine; create_engine('nixl')": "pip install 'kvpool[nixl]', "
    "for CUDA 13 pip install 'kvpool[nixl-cu13]'",
    "from disagg import create_engine; create_engine('mooncake')": "Mooncake is not installed: "
    "pip install 'kvpool[mooncake]', without CUDA pip install 'kvpool[mooncake-cpu]'",
}
EXPORTED = """
from disagg.exporter import export
with export({}) as server:
    assert server.port
"""


def run(*command: str | Path, cwd: Path, status: int = 0, **variables: str) -> str:
    """What a command says, on both streams."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=CLEAN | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def files(*options: str) -> list[Path]:
    """Files of the repository, by options of `git ls-files`; without git, all files."""
    git = ["git", "ls-files", "-z", *options]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
    return [Path(name) for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def build(kind: str, folder: Path, cwd: Path, **variables: str) -> None:
    """Builds with the packages that are here, and downloads nothing."""
    program = f"import setuptools.build_meta as b, sys; b.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", program, folder, cwd=cwd, **variables)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """A source distribution, unpacked. It is built of a copy: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("sdist")
    if DIST is None:
        copy = folder / "checkout"
        for path in files(*NEW_TOO):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path)
        build("sdist", folder, copy, SETUPTOOLS_SCM_PRETEND_VERSION_FOR_KVPOOL="9.8.7")
    [archive] = Path(DIST or folder).glob("*.tar.gz")
    # our own archive: Python before 3.11.4 takes no filter
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_sdist_holds_every_file_of_the_repository(sdist):
    assert not [path for path in files("--cached") if not (sdist / path).is_file()]


def built_wheel(sdist: Path, folder: Path) -> Path:
    """A wheel of the source distribution, without git and without tags."""
    if DIST is None:
        build("wheel", folder, sdist)
    [wheel] = Path(DIST or folder).glob("*.whl")
    return wheel


def check_files(wheel: Path, release: str) -> None:
    """One file of C, stripped, for every Python from 3.10 on; beside it packages and their data."""
    assert wheel.name.startswith(f"{release}-cp310-abi3-")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"{release}.dist-info")}
        compiled = archive.read("kvpool/_native/runs.abi3.so")
        assert archive.read(f"{release}.dist-info/licenses/LICENSE")
    packaged = {path for path in files(*NEW_TOO) if path.parts[0] in PACKAGES}
    data = {path.as_posix() for path in packaged if path.suffix not in NO_DATA}
    assert names == data | {"kvpool/_native/runs.abi3.so"}
    assert len(compiled) < MOST_COMPILED_BYTES and b".symtab" not in compiled


def test_the_wheel_alone_moves_bytes_and_says_what_an_extra_needs(sdist, tmp_path):
    wheel = built_wheel(sdist, tmp_path)
    check_files(wheel, sdist.name)
    home = tmp_path / "clean"
    venv.create(home, with_pip=True)
    python, elsewhere = home / "bin" / "python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, wheel, cwd=elsewhere)

    listed = run(python, "-m", "pip", "list", "--format", "freeze", cwd=elsewhere)
    names = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in listed.splitlines()
        if "==" in line
    }
    tools = {"pip", "setuptools", "wheel"}
    assert names - tools == {"kvpool", "msgspec", "numpy", "typing-extensions"}

    run(python, "-c", (ROOT / "tests" / "alone.py").read_text(), cwd=elsewhere)
    said = run(python, "-c", asked(SENTENCES), cwd=elsewhere).splitlines()
    for sentence, answer in zip(SENTENCES.values(), said, strict=True):
        assert answer.endswith(sentence)
    command = run(home / "bin" / "kvpool", "--version", cwd=elsewhere, status=1)
    assert command == "kvpool --version needs rich: pip install 'kvpool[cli]'\n"

    # the command as it is said: kvpool is on no index, and pip keeps the installed one
    run(*pip, "kvpool[metrics]", cwd=elsewhere)
    run(python, "-c", EXPORTED, cwd=elsewhere)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_version_is_that_of_the_tag(tmp_path):
    shutil.copy(PYPROJECT, tmp_path)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")

    def version() -> str:
        return run(sys.executable, "-m", "setuptools_scm", cwd=tmp_path).splitlines()[0]

    def commit() -> None:
        run(*git, "commit", "-q", "--allow-empty", "-m", "a", cwd=tmp_path)

    assert version() == "0.1.dev0"  # files without git
    run(*git, "init", "-q", cwd=tmp_path)
    run(*git, "add", ".", cwd=tmp_path)
    commit()
    assert version().startswith("0.1.dev1+g")  # before the first release, or a clone without tags
    run(*git, "tag", "v1.2.3", cwd=tmp_path)
    assert version() == "1.2.3"
    commit()
    assert version().startswith("1.2.4.dev1+g")


def test_every_python_that_is_supported_is_tested_with_wheels():
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    wheels = tomllib.loads(PYPROJECT.read_text())["tool"]["cibuildwheel"]["build"]
    assert wheels == [f"cp{python.replace('.', '')}-manylinux_*" for python in classifiers]
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', ci[ci.index("  package:") :]) == classifiers


def test_the_page_about_installation_lists_every_extra():
    extras = PROJECT["optional-dependencies"]
    rows = re.findall(r"^\| (`.+?) \|.*\|(.*)\|$", (ROOT / "docs/install.md").read_text(), re.M)
    listed = {name: installs for names, installs in rows for name in re.findall(r"`(.+?)`", names)}
    assert sorted(listed) == sorted(extras)
    assert [f"kvpool[{','.join(re.findall('`(.+?)`', listed['all']))}]"] == extras["all"]


def asked(statements):
    """A program that prints a line for each statement: what it raises."""
    lines = [f"try:\n    {each}\nexcept Exception as e:\n    print(e)\n" for each in statements]
    return "".join(lines)


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_every_requirement_has_a_lower_bound(extra):
    for requirement in requirements([extra]):
        if not requirement.startswith("kvpool["):
            assert "==" in lowest(requirement)


@pytest.mark.parametrize("package", EXTRAS)
def test_the_extra_of_a_missing_package_installs_it(package):
    name, extra = EXTRAS[package]
    wanted = {line for line in requires("kvpool") or () if f'extra == "{extra}"' in line}
    assert any(re.match(rf"{name.lower().removeprefix('py')}\b", line) for line in wanted)


def test_a_package_that_is_there_and_broken_is_not_called_missing():
    broken = ImportError("libcudart.so.13: cannot open shared object file", name="torch")
    other = ModuleNotFoundError("No module named 'acme'", name="acme")
    assert missing("MHAPool", broken) is broken and missing("MHAPool", other) is other
    inner = ModuleNotFoundError("No module named 'torch'", name="torch")
    found = missing("MHAPool", inner)
    assert isinstance(found, MissingExtra) and found.name == "torch"
    assert str(found) == f"MHAPool needs PyTorch: {install('torch')}"
