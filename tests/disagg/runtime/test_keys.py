"""Key files: who may read them, which are refused, and how they are changed while endpoints run."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys

import pytest
from typer.testing import CliRunner

from disagg import DecodeEndpoint, create_engine
from disagg.runtime.keys import write_keys
from disagg.runtime.sockets.tls import open_keys, open_tls_files
from kvpool.cli import app
from tests.certificates import certify
from tests.disagg.runtime.sides import decode_side, moves, pool, prefill_side
from tests.disagg.waiting import until
from tests.outputs import output_of

OTHER_USER = 65534
TCP = "tcp://127.0.0.1:*"
SIDES = "prefill", "decode"


@pytest.fixture
def own(keys, tmp_path):
    """A deployment's keys that a test may change."""
    return shutil.copytree(keys, tmp_path / "keys")


def test_files_of_keys_are_their_owners_alone_and_are_never_overwritten(tmp_path):
    path = tmp_path / "k"
    printed = CliRunner().invoke(app, ["keys", str(path)]).output
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    assert sorted(files) == ["ca.key", "ca.pem", "decode.pem", "prefill.pem"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert files["ca.key"] not in files["prefill.pem"] + files["decode.pem"]
    assert "PRIVATE" not in printed and "kvpool keys" in printed
    again = CliRunner().invoke(app, ["keys", str(path)])
    assert again.exit_code == 1 and "File exists" in again.output
    assert {file.name: file.read_bytes() for file in path.iterdir()} == files


def test_the_command_says_as_json_what_it_wrote_and_renews_it(tmp_path):
    path = tmp_path / "k"
    listed = []
    for options in ([], ["--renew", "--days", "7"]):
        done = CliRunner().invoke(app, ["keys", str(path), "--json", *options])
        listed.append(output_of("keys", done.stdout))
        assert [each["file"] for each in listed[-1]] == [f"{path}/{side}.pem" for side in SIDES]
    (before, _), (after, _) = listed
    assert before["fingerprint"] != after["fingerprint"] and before["expires"] > after["expires"]
    (path / "ca.key").unlink()
    refused = CliRunner().invoke(app, ["keys", str(path), "--renew"])
    assert refused.exit_code == 1 and f"{path}/ca.key: No such file" in refused.output


def test_files_that_are_not_of_kvpool_keys_are_not_renewed(own):
    (own / "ca.pem").write_bytes(b"no certificate")
    with pytest.raises(ValueError, match=r"ca\.key or ca\.pem: "):
        write_keys(own, renew=True)


def test_each_side_needs_its_own_file_only(own):
    for name in ("ca.key", "ca.pem", "prefill.pem"):
        (own / name).unlink()
    assert open_keys(own, "decode").side == open_keys(own / "decode.pem", "decode").side == "decode"
    with pytest.raises(ValueError, match=r"prefill\.pem: no such file.*kvpool keys FOLDER"):
        open_keys(own, "prefill")


def spoil(own, what):
    file = own / "decode.pem"
    certificates = (own / "decode.pem").read_bytes().partition(b"-----BEGIN CERT")[2]
    if what == "prefill's":
        shutil.copy(own / "prefill.pem", file)
    elif what == "a link":
        file.rename(own / "elsewhere")
        file.symlink_to(own / "elsewhere")
    elif what == "without a key":
        file.write_bytes(b"-----BEGIN CERT" + certificates)
    elif what == "no pair":
        private = (own / "prefill.pem").read_bytes().partition(b"-----BEGIN CERT")[0]
        file.write_bytes(private + b"-----BEGIN CERT" + certificates)
    elif what == "expired":
        write_keys(own, -0.5, renew=True)
    elif what == "long":
        file.write_bytes(bytes(1 << 17))
    elif isinstance(what, int):
        file.chmod(what)
    else:
        file.write_bytes(what)


WRONG = [
    (
        "prefill's",
        "its certificate is refused: unsuitable certificate purpose: decode's has the ext",
    ),
    ("a link", "a symbolic link is not followed"),
    ("without a key", "no private key with its certificate"),
    ("no pair", "no private key with its certificate: KEY_VALUES_MISMATCH"),
    ("expired", "its certificate is refused: certificate has expired"),
    ("long", "more than 65,536 bytes"),
    (0o640, r"mode is 0640: other users may open it\. Run: chmod go-rwx"),
    (0o604, "mode is 0604: other users may open it"),
    (b"", "not as kvpool keys writes it"),
    (b'{"side": "decode", "public": "x"}', "not as kvpool keys writes it. Copy its file"),
    (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n" * 2, "no private key"),
]


@pytest.mark.parametrize(("what", "sentence"), WRONG, ids=[str(what)[:16] for what, _ in WRONG])
def test_a_file_that_cannot_be_right_is_refused_at_once_by_name(own, what, sentence):
    spoil(own, what)
    with pytest.raises(ValueError, match=sentence) as refused:
        DecodeEndpoint(pool().layout, create_engine("local"), keys=own)
    assert str(refused.value).startswith("keys: ")
    assert "decode.pem" in str(refused.value)


def test_a_folder_that_others_can_write_to_is_refused(own):
    own.chmod(0o770)
    with pytest.raises(ValueError, match=r"mode is 0770: other users may write to it.*chmod go-w"):
        open_keys(own, "decode")


@pytest.mark.root
@pytest.mark.parametrize("what", ["decode.pem", ""])
def test_another_users_file_or_folder_is_refused(own, what):
    os.chown(own / what, OTHER_USER, -1)
    with pytest.raises(ValueError, match=f"user {OTHER_USER} owns it.*Run: chown 0"):
        open_keys(own, "decode")


# an organisation's own files


def organisation(keys, folder, side, **wrong):
    """Files as an organisation has them: its authority's, and a key with a certificate."""
    folder.mkdir()
    whole = certify(keys, folder / "both", side, **wrong).read_bytes()
    private, begin, certificate = whole.partition(b"-----BEGIN CERT")
    files = {"ca": keys / "ca.pem", "certificate": folder / "crt", "key": folder / "key"}
    files["certificate"].write_bytes(begin + certificate)
    files["key"].write_bytes(private)
    files["key"].chmod(0o600)
    return files


def test_an_organisations_own_files_do_as_well(keys, tmp_path):
    mine, theirs = (organisation(keys, tmp_path / side, side) for side in SIDES)
    with prefill_side(TCP, tls=mine) as prefill, decode_side(tls=theirs) as decode:
        decode[0].connect([prefill[0].address], timeout=20)
        moves(*prefill, *decode)


def test_a_link_that_a_rotation_turns_is_followed(keys, tmp_path):
    """As Kubernetes mounts secrets."""
    files = organisation(keys, tmp_path / "one", "decode")
    (tmp_path / "current").symlink_to(tmp_path / "one")
    linked = {name: tmp_path / "current" / path.name for name, path in files.items()}
    credentials = open_tls_files(linked | {"ca": files["ca"]}, "decode")
    before = credentials.context()
    assert credentials.context() is before
    organisation(keys, tmp_path / "two", "decode")
    (tmp_path / "next").symlink_to(tmp_path / "two")
    (tmp_path / "next").rename(tmp_path / "current")
    assert credentials.context() is not before


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"uri": "spiffe://a/b"}, "names spiffe://a/b; decode's has urn:kvpool:decode in its subj"),
        ({"usage": "prefill"}, "unsuitable certificate purpose"),
        ({"password": b"x"}, "the private key is encrypted"),
    ],
)
def test_an_organisations_file_that_makes_no_decode_is_refused(keys, tmp_path, wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        open_tls_files(organisation(keys, tmp_path / "d", "decode", **wrong), "decode")


def test_an_authoritys_file_may_have_comments_and_must_have_certificates(keys, tmp_path):
    files = organisation(keys, tmp_path / "d", "decode")
    files["ca"] = tmp_path / "bundle"
    files["ca"].write_bytes("# Autorité\n".encode() + (keys / "ca.pem").read_bytes() + b"\xff")
    open_tls_files(files, "decode").context()
    for content, said in (
        (b"# none", f"{files['ca']}: no certificate is in it"),
        (WRONG[-1][0], "the authority's certificate cannot be read"),
    ):
        files["ca"].write_bytes(content)
        with pytest.raises(ValueError, match=said):
            open_tls_files(files, "decode")


@pytest.mark.parametrize(("name", "mode"), [("key", 0o640), ("ca", 0o666), ("certificate", 0o622)])
def test_an_organisations_files_are_closed_to_others_too(own, tmp_path, name, mode):
    files = organisation(own, tmp_path / "d", "decode")
    files[name].chmod(mode)
    with pytest.raises(ValueError, match=rf"tls: {files[name]}: .*mode is 0{mode:o}"):
        open_tls_files(files, "decode")


# changed while endpoints run


def test_new_files_are_for_new_connections_and_open_ones_go_on(own, other_keys, caplog):
    with (
        prefill_side(TCP, keys=own) as prefill,
        decode_side(keys=own) as old,
        decode_side(keys=own) as late,
    ):
        old[0].connect([prefill[0].address], timeout=20)
        write_keys(own, renew=True)
        late[0].connect([prefill[0].address], timeout=20)
        for side in SIDES:  # now of another authority
            shutil.copy(other_keys / f"{side}.pem", own / "new")
            (own / "new").rename(own / f"{side}.pem")
        with decode_side(keys=other_keys) as other:
            other[0].connect([prefill[0].address], timeout=20)
            for number, decode in enumerate((old, late, other)):
                moves(*prefill, *decode, f"r{number}")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_broken_file_fails_new_connections_only_and_is_named_once(own, caplog):
    with prefill_side(TCP, keys=own) as prefill, decode_side(keys=own) as decode:
        decode[0].connect([prefill[0].address], timeout=20)
        shutil.copy(own / "prefill.pem", own / "good")
        (own / "bad").write_bytes(b"half of it")
        (own / "bad").chmod(0o600)
        (own / "bad").rename(own / "prefill.pem")
        with decode_side(keys=own) as other:
            link = other[0].connect([prefill[0].address])
            until(prefill[0], lambda: "prefill.pem: not as kvpool keys writes it" in caplog.text)
            with pytest.raises(TimeoutError):
                other[0].handshake(link, 0.5)
            moves(*prefill, *decode, "meanwhile")
            (own / "good").rename(own / "prefill.pem")
            other[0].handshake(link, 20)
            moves(*prefill, *other, "after")
        assert caplog.text.count("not as kvpool keys writes it") == 1


def test_a_dialler_with_a_broken_file_waits_until_it_is_good(own, caplog):
    with prefill_side(TCP, keys=own) as prefill, decode_side(keys=own) as decode:
        (own / "decode.pem").rename(own / "away")
        link = decode[0].connect([prefill[0].address])
        until(decode[0], lambda: "decode.pem: no such file" in caplog.text)
        (own / "away").rename(own / "decode.pem")
        decode[0].handshake(link, 20)
        moves(*prefill, *decode)


def test_without_package_cryptography_the_command_says_what_to_install(keys, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "disagg.runtime.keys")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs cryptography: pip install 'kvpool\[keys"):
        CliRunner().invoke(app, ["keys", str(tmp_path / "k")], catch_exceptions=False)
    assert not (tmp_path / "k").exists()
