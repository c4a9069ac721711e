"""A suite file becomes rows whose settings are all known, or an error that names what is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.testing.suite import ServerSettings, SuiteError, load
from tests.disagg.testing.suites import NAMES, TEXT

COMPATIBILITY = Path(__file__).parents[3] / "docs" / "compatibility.toml"


@pytest.fixture
def suite_of(tmp_path):
    def made(text=TEXT):
        path = tmp_path / "suite.toml"
        path.write_text(text)
        return load(path)

    return made


def test_rows_have_defaults_and_their_own_settings(suite_of, tmp_path):
    suite = suite_of()
    first, draft, last = suite.pairs
    assert [pair.name for pair in suite.pairs] == NAMES
    assert (first.connector, first.model, first.transport) == ("kvpool", "llama", "local")
    assert (first.prompts, first.new_tokens) == ((70, 200), 16)
    assert first.prefill == ServerSettings(
        engine="vllm",
        block_size=32,
        tp=2,
        pp=1,
        dtype="bfloat16",
        draft=None,
        method=None,
        args={},
    )
    assert first.decode == replace(first.prefill, tp=1, block_size=128)
    assert (draft.prefill.draft, draft.prefill.method) == ("eagle", "eagle")
    assert draft.decode.args == {"max_model_len": 512}
    assert last.prefill == last.decode
    assert (last.prefill.engine, last.prefill.dtype) == ("sglang", "float32")
    assert (last.prompts, last.new_tokens) == ((9,), 4)


def test_paths_are_those_beside_the_file(suite_of, tmp_path, monkeypatch):
    for name in ("PYTHON", "PYTHONPATH"):
        monkeypatch.delenv(f"KVPOOL_VLLM_{name}", raising=False)
    suite = suite_of()
    assert suite.engines["vllm"].python == sys.executable
    assert suite.engines["vllm"].pythonpath == f"{tmp_path.parent}:{tmp_path / 'site'}"
    assert suite.engines["sglang"].python == str(tmp_path / "venv/bin/python")
    assert suite.engines["sglang"].env == {"OMP_NUM_THREADS": "1"}
    assert suite.models["eagle"] == str(tmp_path / "drafts/eagle")
    assert suite.models["llama"] == ("vllm", "-m", "maker", "{folder}", "llama")
    monkeypatch.setenv("KVPOOL_VLLM_PYTHON", "/venv/bin/python")
    monkeypatch.setenv("KVPOOL_SGLANG_PYTHON", "/venv/bin/python")
    monkeypatch.setenv("KVPOOL_VLLM_PYTHONPATH", "/lmcache")
    suite = suite_of()
    assert suite.engines["vllm"].python == "/venv/bin/python"
    assert suite.engines["vllm"].pythonpath.endswith(f"{tmp_path / 'site'}:/lmcache")
    assert suite.engines["sglang"].python == str(tmp_path / "venv/bin/python")
    assert suite.engines["sglang"].pythonpath == ""
    monkeypatch.setenv("KVPOOL_VLLM_PYTHON", "bin/python")
    assert suite_of().engines["vllm"].python == str(Path.cwd() / "bin/python")


def test_values_in_a_list_make_a_row_each(suite_of):
    text = TEXT.replace("prefill = {tp = 2}", "prefill = {tp = [1, 2], pp = [1, 2]}")
    suite = suite_of(
        text.replace('name = "draft"', 'name = "draft"\nconnector = ["kvpool", "nixl"]')
    )
    sides = [pair.prefill for pair in suite.pairs[:4]]
    assert [(side.tp, side.pp) for side in sides] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    names = [pair.name for pair in suite.pairs]
    assert names[3] == "kvpool: llama, vllm 32 tp2 pp2 to vllm 128"
    assert names[4:6] == ["draft, connector=kvpool", "draft, connector=nixl"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[pair]]", "[[pair", "not TOML: "),
        (
            "[models]",
            "[model]",
            "model: no such key; there are engines, models, defaults, pair. Did you mean 'models'?",
        ),
        (TEXT[TEXT.index("[[pair]]") :], "", "pair: missing; give one [[pair]] or more."),
        (
            "[engines.sglang]",
            "[engines.trtllm]",
            "engines.trtllm: no such key; there are vllm, sglang.",
        ),
        ('"1"', "1", "engines.sglang.env: {'OMP_NUM_THREADS': 1} is not a table of texts."),
        (
            '["vllm", "-m",',
            '["trtllm", "-m",',
            "models.llama: 'trtllm' is not in this file, which has vllm, sglang.",
        ),
        (
            '"drafts/eagle"',
            "7",
            "models.eagle: 7 is not a folder, or a list: an engine and the "
            "arguments of its Python.",
        ),
        ("tp = 2", 'tp = "two"', "pair 1: prefill.tp: 'two' is not a whole number from 1."),
        ("tp = 2", "tp = [2, 0]", "pair 1: prefill.tp: 0 is not a whole number from 1."),
        ("tp = 2", "tp = true", "pair 1: prefill.tp: True is not a whole number from 1."),
        (
            "tp = 2",
            "tpp = 2",
            "pair 1: prefill.tpp: no such key; there are engine, block_size, "
            "tp, pp, dtype, draft, method, args. Did you mean",
        ),
        ("{tp = 2}", "[{tp = 2}]", "pair 1: prefill: [{'tp': 2}] is not a table."),
        (
            "prompts = [9]",
            "prompts = [0]",
            "pair 3: prompts: [0] is not a list of whole numbers from 1.",
        ),
        (
            "block_size = 32}",
            'block_size = "x"}',
            "defaults: side.block_size: 'x' is not a whole number from 1.",
        ),
        (
            ", block_size = 32}",
            "}",
            "pair 1: prefill.block_size: missing; give a whole number from 1.",
        ),
        ('model = "llama"\n', "", "pair 1: model: missing; give a text that is not empty."),
        (
            'model = "llama"',
            'model = "lama"',
            "pair 1: model: 'lama' is not in this file, which "
            "has llama, eagle. Did you mean 'llama'?",
        ),
        (
            "sglang-nixl",
            "sglang-ucx",
            "pair 3: connector: 'sglang-ucx' is not one of kvpool, "
            "nixl, mooncake, lmcache, sglang-nixl, sglang-mooncake.",
        ),
        (
            "sglang-nixl",
            "nixl",
            "pair 3: prefill.engine: 'sglang' cannot have connector 'nixl', only vllm can.",
        ),
        (
            '{draft = "eagle", method = "eagle"}',
            '{draft = "eagle"}',
            "pair 2: prefill.method: missing beside draft 'eagle'; give eagle, eagle3, mtp or ",
        ),
        (
            'draft = "eagle",',
            'draft = "eagl",',
            "pair 2: prefill.draft: 'eagl' is not in this "
            "file, which has llama, eagle. Did you mean 'eagle'?",
        ),
        (
            'name = "draft"',
            f'name = "{NAMES[0]}"',
            f"pair 2: name: {NAMES[0]!r} is another row's; give it its own.",
        ),
        (
            "prompts = [9]",
            'transport = "ucx"',
            "pair 3: transport: 'ucx' is not one of local, nixl, mooncake.",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_row_key_and_value(suite_of, tmp_path, old, new, message):
    assert old in TEXT
    with pytest.raises(SuiteError) as error:
        suite_of(TEXT.replace(old, new, 1))
    said = str(error.value)
    assert said.startswith(f"{tmp_path / 'suite.toml'}: ")
    assert message in said


def test_an_engine_that_a_row_needs_and_the_file_has_not(suite_of):
    text = TEXT.replace('[engines.sglang]\npython = "venv/bin/python"\nenv', "#")
    with pytest.raises(SuiteError, match=r"pair 3: prefill\.engine: 'sglang' is not in this file"):
        suite_of(text)


def test_a_digest_changes_with_every_setting_of_its_row_and_with_no_other(suite_of):
    before = suite_of()
    digests = [before.digest(pair) for pair in before.pairs]
    assert len({*digests}) == len(digests)
    for old, new, changed in [
        ("tp = 2", "tp = 4", [0]),
        ("max_model_len = 512", "max_model_len = 513", [1]),
        ("drafts/eagle", "drafts/other", [1]),
        ('OMP_NUM_THREADS = "1"', 'OMP_NUM_THREADS = "2"', [2]),
        ('"maker"', '"other"', [0, 1, 2]),
        ("new_tokens = 4", "new_tokens = 5", [2]),
        ('pythonpath = "..:site"', 'pythonpath = ".."', [0, 1]),
    ]:
        after = suite_of(TEXT.replace(old, new))
        now = [after.digest(pair) for pair in after.pairs]
        assert [n for n, digest in enumerate(digests) if digest != now[n]] == changed, new


def test_the_suite_of_the_documents_is_for_any_machine():
    suite = load(COMPATIBILITY)
    assert 25 <= len(suite.pairs) <= 32
    assert not [line for line in COMPATIBILITY.read_text().splitlines() if '"/' in line]
    for model in suite.models.values():
        assert model[:3] == ("vllm", "-m", "tests.engines.vllm.models")
