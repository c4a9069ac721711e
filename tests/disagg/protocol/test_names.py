"""One rule for names, on the wire and for callers; and a peer's sentences are one harmless line."""

from __future__ import annotations

import unicodedata

import msgspec
import pytest
from msgspec import inspect

from disagg import KVPoll, RoomError
from disagg.protocol import codec, messages
from disagg.protocol.codec import pack_aux, unpack_aux
from disagg.protocol.events import Received
from disagg.protocol.messages import WireError, room_name
from disagg.protocol.versions import PROTOCOL
from kvpool.layout import Axis, LayoutError
from kvpool.layout.text import UNPRINTABLE, is_printable, one_line
from tests.disagg.protocol.pair import Pair, hello
from tests.fuzz import build

EDGES = [code for span in UNPRINTABLE for code in span]
BAD = ["", "a\nb", "\x1b[31m", "a\u202eb", "a\u2028", "\u00a0", "a\n"]
GOOD = ["r", "a b", "chat-completions/7#1", "é", "Ж", "請求", "🙂", "x" * 256]
FORGED = "gone\n2026-01-01 ERROR root: all is lost\r\n\x1b[2K\x9b\u202e"
HARMLESS = r"gone 2026-01-01 ERROR root: all is lost \x1b[2K\x9b\u202e"


def text_fields():
    """Message and field of everything that is called by a name."""
    return [
        (name, field.name)
        for name, kind in build.message_types().items()
        for field in inspect.type_info(kind).fields
        if field.name in ("room", "attempt", "generation", "engine")
    ]


def sent(kind, **fields):
    """A message of a peer that checks nothing, as it is read here."""
    valid = build.message(build.message_types()[kind], build.Seeded(1), protocol=PROTOCOL)
    return codec.decode(msgspec.msgpack.encode(valid | fields))


@pytest.mark.parametrize(("kind", "field"), text_fields())
def test_a_frame_with_a_text_that_is_no_name_is_malformed(kind, field):
    most = messages.MAX_ROOM_NAME if field == "room" else 128
    for bad in (*BAD, "x" * (most + 1)):
        with pytest.raises(WireError, match="malformed message"):
            sent(kind, **{field: bad})
    assert getattr(sent(kind, **{field: "x" * most}), field) == "x" * most


@pytest.mark.parametrize("bad", BAD)
def test_id_lists_owners_and_aux_values_have_names_too(bad):
    span = {"ids": bytes(8), "first_item": 0}
    for fields in ({"spans": {bad: span}}, {"layers": {"owner": bad, "start": 0, "stop": 1}}):
        with pytest.raises(WireError, match="malformed message"):
            sent("ChunkReady", **fields)
    with pytest.raises(WireError, match="malformed aux"):
        unpack_aux(msgspec.msgpack.encode({bad: 1}))
    with pytest.raises(RoomError, match="aux"):
        pack_aux({bad: 1})


@pytest.mark.parametrize("name", [*BAD, *GOOD, "x" * 257, 0, 1, (1 << 63) - 1])
def test_a_caller_may_name_a_room_as_a_peer_may(name):
    def taken(call):
        try:
            return call() == name
        except ValueError:
            return False

    assert taken(lambda: room_name(name)) == taken(lambda: sent("DropRoom", room=name).room)
    assert taken(lambda: room_name(name)) == (name in GOOD or isinstance(name, int))


def test_what_is_printable_does_not_depend_on_the_unicode_version():
    for code in EDGES:
        assert not is_printable(chr(code)) and not chr(code).isprintable()
    assert is_printable("\U0001fae9")  # assigned in Unicode 16: no version of Python may refuse it
    assert unicodedata.category("\u0378") == "Cn" and is_printable("\u0378")
    assert Axis("請求", 1, 1).name == "請求"
    with pytest.raises(LayoutError, match="printable"):
        Axis("a\u202e", 1, 1)


def test_a_refused_name_is_told_in_words():
    with pytest.raises(WireError) as told:
        sent("DropRoom", room="a\nb")
    sentence = "malformed message: Expected `str` of printable characters - at `$.room`"
    assert str(told.value) == sentence


def test_what_a_frame_says_is_quoted_without_escape_codes():
    with pytest.raises(WireError) as told:
        codec.decode(msgspec.msgpack.encode({"type": FORGED}))
    assert HARMLESS in str(told.value) and str(told.value).isprintable()


@pytest.mark.parametrize(
    ("kind", "field"), [("Abort", "reason"), ("DropRoom", "reason"), ("Digests", "problem")]
)
def test_a_sentence_of_a_peer_is_one_line_without_escape_codes(kind, field):
    assert getattr(sent(kind, **{field: FORGED}), field) == HARMLESS
    assert len(getattr(sent(kind, **{field: "\x1b" * 65_536}), field)) == 4096


def test_reasons_of_a_refusal_are_one_line_without_escape_codes():
    refusal = sent("Refuse", reasons=[FORGED, "and\nmore"])
    assert refusal.why == f"{HARMLESS} and more"
    assert len(sent("Refuse", reasons=["x" * 65_536] * 9).why) == 65_536


def test_of_a_refusal_no_more_is_kept_than_is_shown():
    refusal = sent("Refuse", reasons=["\x1b" * 65_536] * 9 + ["first", ""] * 1000)
    assert len(" ".join(refusal.reasons)) <= 65_536 and len(refusal.reasons) == 1
    assert len(sent("Refuse", reasons=["reason"] * 50_000).reasons) == 65_536 // 7 + 1


def test_a_reason_reaches_failures_and_logs_of_either_side_as_one_line(caplog):
    caplog.set_level("INFO", "disagg")
    pair = Pair()
    pair.ask()
    (request,) = pair.prefill.rooms.by_name["r"].requests.values()
    about = {"room": "r", "generation": request.generation, "attempt": request.attempt}
    pair.tell(pair.decode, Received(0, sent("Abort", **about, reason=FORGED)))
    assert pair.decode.poll("r") is KVPoll.Failed
    assert pair.decode.failure("r").reason == HARMLESS
    pair.tell(pair.prefill, Received(b"x", sent("Refuse", reasons=[FORGED])))
    assert list(pair.prefill.peers.refusals) == [HARMLESS]
    assert HARMLESS in caplog.text
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_a_text_is_shortened_after_it_was_made_harmless():
    assert one_line("\x1b" * 10, 12) == r"\x1b\x1b\x1b"
    assert one_line("a\n\n  b\t c", 100) == "a b c"
    assert one_line("abc d", 4) == "abc"  # the same again if it is read back
    assert one_line("\udce9", 100) == r"\udce9"


def test_the_layout_of_a_hello_is_quoted_without_escape_codes(caplog):
    pair = Pair()
    layout = msgspec.msgpack.encode({"version": FORGED})
    greeting = msgspec.structs.replace(hello("d2"), layout=layout)
    pair.tell(pair.prefill, Received(b"d2", greeting))
    (refusal,) = pair.prefill.peers.refusals
    assert refusal.startswith("decode d2: malformed layout") and refusal.isprintable()
