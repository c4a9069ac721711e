"""Every message and layout of a spoken protocol is read and written as that protocol wrote it.

Where a test fails here, `PROTOCOL` has to rise (`disagg/protocol/versions.py`), and `record.py` to
write the new number's bytes. Those of a released number stay as they are.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import msgspec
import pytest

from disagg.protocol import codec, messages, versions
from disagg.protocol.versions import ADDED, PROTOCOL, fields_lacked
from kvpool.layout import PoolLayout
from tests.compat.golden import SPOKEN, golden, keys_of

OLD = SPOKEN[0]
STEPS = list(pairwise(SPOKEN))
MESSAGES = [(number, name) for number in SPOKEN for name in golden(number)["messages"]]
LAYOUTS = [(number, name) for number in SPOKEN for name in golden(number)["layouts"]]


@pytest.mark.parametrize(("number", "name"), MESSAGES)
def test_a_message_is_read_and_written_as_its_protocol_wrote_it(number, name):
    recorded = golden(number)["messages"][name]
    data = bytes.fromhex(recorded["bytes"])
    message = codec.decode(data)
    fields = json.loads(msgspec.json.encode(message))
    newer = {name: fields.pop(name) for name in fields.keys() - recorded["fields"].keys()}
    assert fields == recorded["fields"]
    assert not any(newer.values())  # what is not said is empty
    assert codec.encode(message, number) == data


def test_every_message_and_field_has_bytes_in_the_current_protocol():
    keys = keys_of(PROTOCOL)
    kinds = {str(kind.__struct_config__.tag): kind for kind in get_args(messages.Message)}
    assert keys.keys() - {"space"} == kinds.keys()
    for tag, kind in kinds.items():
        assert keys[tag] == {"type", *kind.__struct_fields__}


@pytest.mark.parametrize(("before", "number"), STEPS)
def test_what_a_protocol_added_is_what_its_bytes_have_more(before, number):
    older, newer = keys_of(before), keys_of(number)
    added = {tag for tag in newer if tag not in older}
    added |= {f"{tag}.{name}" for tag in older for name in newer[tag] - older[tag]}
    assert added == ADDED[number]
    assert not any(older[tag] - newer[tag] for tag in older)


def test_a_new_field_of_a_message_has_a_default():
    """Without which a message of the older protocol could not be read."""
    for kind in get_args(messages.Message):
        new = fields_lacked(str(kind.__struct_config__.tag), SPOKEN[0])
        required = {field.name for field in msgspec.structs.fields(kind) if field.required}
        assert not required & {*new}


@pytest.mark.parametrize(("number", "name"), LAYOUTS)
def test_a_layout_is_read_and_written_as_its_protocol_wrote_it(number, name):
    recorded = golden(number)["layouts"][name]
    data = bytes.fromhex(recorded["bytes"])
    layout = PoolLayout.from_msgpack(data)
    assert layout == PoolLayout.from_json(recorded["json"])
    assert codec.layout_for(layout, number) == data


def test_a_layout_that_an_older_protocol_cannot_say_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(versions.LACKED, OLD, versions.lacked_by(OLD) | {"space.whole"})
    layout = PoolLayout.from_msgpack(bytes.fromhex(golden(OLD)["layouts"]["mla"]["bytes"]))
    (space,) = layout.spaces
    newer = replace(layout, spaces=(replace(space, window=16, whole=True),))
    with pytest.raises(ValueError, match=f"space kv: whole=True, which protocol {OLD} cannot say"):
        codec.layout_for(newer, OLD)
    assert msgspec.msgpack.decode(codec.layout_for(newer, PROTOCOL))["spaces"][0]["whole"]
