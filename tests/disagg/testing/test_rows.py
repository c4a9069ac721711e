"""States of both sides are compared by owner, layer, role, position, head and byte."""

from __future__ import annotations

import json

import numpy as np
import pytest

from disagg.testing.state.rows import compare

TOKENS, HEADS, BYTES = 9, 4, 8


def save(folder, side, arrays, *, rank="0.0", tokens=TOKENS, kind="rows", unread=(), **facts):
    """A rank's file; `arrays` by owner, layer and role."""
    parts = {}
    for key in arrays:
        owner, layer, part = key.split()
        usual = {"owner": owner, "layer": int(layer), "part": part}
        parts[key] = {**usual, "join": "heads", "start": 0, "dtype": "uint8", **facts}
    told = json.dumps({"tokens": tokens, "parts": parts, "unread": list(unread)})
    path = folder / f"{side}.conform-7.{rank}.{tokens}.{kind}.npz"
    with path.open("wb") as file:
        np.savez(file, told=np.frombuffer(told.encode(), np.uint8), **arrays)


def rows(tokens=TOKENS, heads=HEADS, layer=0):
    count = tokens * heads * BYTES
    return (np.arange(count) * 7 + layer * 31).astype(np.uint8).reshape(tokens, heads, BYTES)


def test_equal_rows_are_equal_where_ranks_and_stages_hold_them_in_parts(tmp_path):
    for layer, rank in ((0, "0.0"), (1, "1.0")):
        save(tmp_path, "prefill", {f"target {layer} k": rows(layer=layer)}, rank=rank)
    for rank in range(2):
        heads = slice(2 * rank, 2 * rank + 2)
        parts = {f"target {layer} k": rows(layer=layer)[:, heads] for layer in range(2)}
        save(tmp_path, "decode", parts, rank=f"0.{rank}")
    found = compare(tmp_path, "conform-7")
    assert found.received and found.parts == 2 and not found.difference


@pytest.mark.parametrize(("dtype", "width"), [("uint8", 1), ("bfloat16", 2), ("float32", 4)])
def test_one_byte_that_differs_is_named_with_both_elements(tmp_path, dtype, width):
    right = np.zeros((TOKENS, HEADS, BYTES), np.uint8)
    wrong = right.copy()
    element = {1: [0x15], 2: [0x80, 0x3F], 4: [0, 0, 0x80, 0x3F]}[width]
    wrong[5, 2, 4 : 4 + width] = element  # 1.0
    save(tmp_path, "prefill", {"target 3 v": right, "target 4 v": right}, dtype=dtype)
    save(tmp_path, "decode", {"target 3 v": wrong, "target 4 v": right}, dtype=dtype)
    byte = 4 + next(number for number, value in enumerate(element) if value)
    values = ("0x00", "0x15") if width == 1 else ("0", "1")
    assert compare(tmp_path, "conform-7").difference == (
        f"target 3 v, token 5, head 2, byte {byte}: {values[0]} on prefill, {values[1]} on decode; "
        "1 of 2 parts differ"
    )


def test_a_head_that_several_ranks_hold_is_compared_with_each_of_them(tmp_path):
    right = rows(heads=2)
    save(tmp_path, "prefill", {"target 0 k": right})
    for rank in range(4):
        held = right[:, rank // 2, None].copy()
        held[3, 0, 0] ^= rank == 3
        save(tmp_path, "decode", {"target 0 k": held}, rank=f"0.{rank}")
    assert "token 3, head 3, byte 0" in compare(tmp_path, "conform-7").difference


def test_a_row_that_all_ranks_hold_is_compared_with_each_of_them(tmp_path):
    right = rows(heads=1)
    save(tmp_path, "prefill", {"target 0 row": right}, join="same")
    for rank in range(2):
        held = right.copy()
        held[0, 0, 1] ^= rank
        save(tmp_path, "decode", {"target 0 row": held}, rank=f"0.{rank}", join="same")
    assert "token 0, head 0, byte 1" in compare(tmp_path, "conform-7").difference


def test_decode_may_hold_fewer_tokens_and_not_more(tmp_path):
    save(tmp_path, "prefill", {"target 0 k": rows()})
    save(tmp_path, "decode", {"target 0 k": rows()[:-1]}, tokens=TOKENS - 1)
    assert not compare(tmp_path, "conform-7").difference
    save(tmp_path, "decode", {"target 0 k": rows(TOKENS + 1)}, tokens=TOKENS + 1)
    text = compare(tmp_path, "conform-7").difference
    assert "decode has tokens 0 to 10, prefill 0 to 9" in text


def test_a_window_is_compared_where_both_sides_have_it(tmp_path):
    save(tmp_path, "prefill", {"target 0 k": rows()[5:]}, start=5)
    save(tmp_path, "decode", {"target 0 k": rows()[4:-1]}, tokens=TOKENS - 1, start=4)
    assert not compare(tmp_path, "conform-7").difference
    save(tmp_path, "decode", {"target 0 k": rows()[3:-1]}, tokens=TOKENS - 1, start=3)
    text = compare(tmp_path, "conform-7").difference
    assert "decode has tokens 3 to 8, prefill 5 to 9" in text


def test_a_recurrent_state_is_compared_with_that_after_as_many_tokens(tmp_path):
    right = rows(1)
    save(tmp_path, "prefill", {"target 0 temporal.0": right}, tokens=8, kind="states", start=8)
    save(tmp_path, "prefill", {"target 0 temporal.0": right ^ 1}, kind="states", start=9)
    save(tmp_path, "decode", {"target 0 temporal.0": right}, tokens=8, kind="states", start=8)
    assert not compare(tmp_path, "conform-7").difference
    (tmp_path / "prefill.conform-7.0.0.8.states.npz").unlink()
    text = compare(tmp_path, "conform-7").difference
    assert text == "decode holds recurrent state of 8 tokens, prefill computed it after 9"


def test_a_layer_that_prefill_lacks_is_a_difference_but_a_draft_is_not(tmp_path):
    save(tmp_path, "prefill", {"target 0 k": rows()})
    save(tmp_path, "decode", {"target 0 k": rows(), "draft 0 k": rows()})
    assert not compare(tmp_path, "conform-7").difference
    save(tmp_path, "decode", {"target 0 k": rows(), "target 1 k": rows()})
    assert "target 1 k: prefill has no such part" in compare(tmp_path, "conform-7").difference


def test_what_cannot_be_read_is_said(tmp_path):
    assert not compare(tmp_path, "conform-7").received
    save(tmp_path, "prefill", {"target 0 k": rows()}, unread=["layer 1: a form"])
    save(tmp_path, "decode", {"target 0 k": rows()})
    assert compare(tmp_path, "conform-7").unread == ("layer 1: a form",)
