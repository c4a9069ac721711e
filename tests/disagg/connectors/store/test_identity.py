"""Whose a request is: two that are not the same have two salts."""

from __future__ import annotations

import time

from hypothesis import given, strategies as st

from disagg.connectors.store.identity import Adapters, Identity
from kvpool.prefix.chain import Chain

TEXTS = st.one_of(
    st.sampled_from(["", "a", '["a", ""]', '["", "a"]', "[", "\ud800", "a\n", '["\\ud800", ""]']),
    st.text(max_size=4),
)
IDENTITIES = st.builds(Identity, tenant=TEXTS, adapter=TEXTS)


@given(IDENTITIES, IDENTITIES)
def test_two_identities_have_two_salts(one, other):
    assert (one == other) == (one.salt == other.salt)
    Chain(16, one.salt)  # it is a text that can be hashed


def test_a_tenant_alone_is_the_salt_of_a_prefix_cache():
    assert Identity().salt == "" and Identity("tenant").salt == "tenant"


def adapter(folder, name="adapter_model.safetensors", data=b"weights"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


def known(adapters, folder):
    until = time.monotonic() + 20
    while (digest := adapters.digest(folder)) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return digest


def test_an_adapter_is_known_by_its_files_wherever_they_lie(tmp_path):
    adapters = Adapters()
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    other = adapter(tmp_path / "other", data=b"Weights")
    renamed = adapter(tmp_path / "renamed", name="adapter_model.bin")
    digests = [known(adapters, folder) for folder in (one, two, other, renamed)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_an_adapter_without_files_here_is_none(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("", "organisation/adapter", str(tmp_path / "empty"), str(tmp_path / "none")):
        adapters = Adapters()
        adapters.digest(folder)
        time.sleep(0.01)
        assert adapters.digest(folder) is None


def test_an_adapter_whose_files_change_has_no_digest_any_more(tmp_path):
    adapters, folder = Adapters(), adapter(tmp_path / "one")
    known(adapters, folder)
    adapter(tmp_path / "one", data=b"other weights")
    assert adapters.digest(folder) is None
