"""An authority is changed while both sides serve, in the steps that docs/operate.md names."""

from __future__ import annotations

import os

import pytest

from tests.certificates import certify
from tests.disagg.runtime.sides import decode_side, moves, prefill_side
from tests.disagg.runtime.transports import TCP
from tests.disagg.waiting import until

SIDES = "prefill", "decode"


def put(path, data):
    """As docs/security.md wants it: by renaming, so that it is never half there."""
    new = path.with_name(f".{path.name}")
    new.touch(0o600)
    new.write_bytes(data)
    os.rename(new, path)


class Side:
    """Files of one side, in a folder of its host."""

    def __init__(self, folder, side):
        folder.mkdir(0o700)
        self.side = side
        self.files = {name: folder / name for name in ("ca", "certificate", "key")}

    def believe(self, *authorities):
        put(self.files["ca"], b"".join((each / "ca.pem").read_bytes() for each in authorities))

    def show(self, authority):
        """A key and a certificate of one file: each rename leaves a pair that belongs together."""
        own = self.files["key"].with_name("own")
        certify(authority, own, self.side)
        put(self.files["key"], own.read_bytes())
        self.files |= {"certificate": self.files["key"]}


@pytest.fixture
def hosts(tmp_path, keys):
    sides = [Side(tmp_path / side, side) for side in SIDES]
    for side in sides:
        side.believe(keys)
        side.show(keys)
    return sides


def test_both_sides_serve_at_every_step_of_a_change_of_authority(hosts, keys, other_keys):
    prefill, decode = hosts
    steps = [
        lambda: prefill.believe(keys, other_keys),
        lambda: decode.believe(keys, other_keys),
        lambda: decode.show(other_keys),
        lambda: prefill.show(other_keys),
        lambda: decode.believe(other_keys),
        lambda: prefill.believe(other_keys),
    ]
    with prefill_side(TCP, tls=prefill.files) as sender, decode_side(tls=decode.files) as running:
        for number, step in enumerate([lambda: None, *steps]):
            step()
            for name, reader in (("running", running), ("new", None)):
                if reader is None:
                    with decode_side(tls=decode.files) as started:
                        hands_over(sender, started, f"{name} {number}")
                else:
                    hands_over(sender, reader, f"{name} {number}")
        # a certificate of the old authority is of no use any more
        decode.believe(keys, other_keys)
        decode.show(keys)
        with decode_side(tls=decode.files) as (old, *_):
            link = old.connect([sender[0].address])
            until(old, lambda: "another authority has made it" in (link.lost or ""))


def hands_over(sender, reader, room):
    """Over a new connection."""
    link = reader[0].connect([sender[0].address], timeout=30)
    moves(*sender, *reader, room)
    reader[0].disconnect(link)
