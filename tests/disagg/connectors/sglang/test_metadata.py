"""The row of SGLang's metadata travels by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from disagg.connectors.sglang.metadata import FIRST_TOKEN, read_row, write_row


def filled(
    *, hidden: int = 8, mask: bool = False, checksum: bool = False, seeds: bool = False
) -> SimpleNamespace:
    """As SGLang's `MetadataBuffers`: tensors `[row, ...]`, some only with an option."""
    buffers = {
        "output_ids": torch.zeros((4, 16), dtype=torch.int32),
        "output_token_logprobs_val": torch.zeros((4, 16)),
        "output_topk_p": torch.zeros((4, 16)),
        "output_topk_index": torch.zeros((4, 16), dtype=torch.int64),
        "output_hidden_states": torch.zeros((4, hidden), dtype=torch.bfloat16),
        "bootstrap_room": torch.zeros((4, 8), dtype=torch.uint64),
    }
    if mask:
        buffers["output_token_sampling_mask_idx"] = torch.zeros((4, 8), dtype=torch.int32)
    if checksum:
        buffers["kv_checksum"] = torch.zeros((4, 8), dtype=torch.uint64)
    if seeds:
        buffers["output_dsa_topk_indices"] = torch.zeros((4, 64), dtype=torch.int32)
    random = torch.Generator().manual_seed(1)
    for tensor in buffers.values():
        rows = tensor.view(torch.uint8)
        rows.copy_(torch.randint(0, 100, rows.shape, dtype=torch.uint8, generator=random))
    return SimpleNamespace(enable_sampling_mask=mask, output_topk=None, **buffers)


def bytes_of(buffers) -> dict[str, torch.Tensor]:
    """All tensors as bytes, as they are now."""
    tensors = {n: value for n, value in vars(buffers).items() if isinstance(value, torch.Tensor)}
    return {name: tensor.view(torch.uint8).clone() for name, tensor in tensors.items()}


def assert_equal(one, other) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_a_row_comes_to_decodes_row_and_to_no_other():
    prefill, decode = filled(), filled()
    expected = bytes_of(decode)
    values = read_row(prefill, 1, drafts=True)
    assert values[FIRST_TOKEN] == prefill.output_ids[1, 0].item()  # for any other engine
    write_row(decode, 3, 7, values, drafts=True)
    for name, tensor in bytes_of(prefill).items():
        expected[name][3] = tensor[1]
    assert_equal(bytes_of(decode), expected)


def test_of_another_engine_the_first_token_is_enough():
    decode = filled()
    write_row(decode, 1, 2**60, {FIRST_TOKEN: 42}, drafts=True)
    assert decode.output_ids[1].tolist() == [42] + [0] * 15
    assert decode.bootstrap_room[1].tolist() == [2**60] + [0] * 7
    assert not decode.output_token_logprobs_val[1].any()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_buffer_that_one_side_lacks_is_refused_by_name(side):
    """SGLang pairs them by position: all that follow would land in their neighbours."""
    prefill, decode = filled(mask=side == "prefill"), filled(mask=side == "decode")
    before = bytes_of(decode)
    with pytest.raises(ValueError, match=f"output_token_sampling_mask_idx: {side} has it"):
        write_row(decode, 0, 7, read_row(prefill, 0, drafts=True), drafts=True)
    assert_equal(bytes_of(decode), before)


DRAFT = ("output_topk_p", "output_topk_index", "output_hidden_states")


def test_what_a_draft_begins_with_comes_where_both_sides_have_one():
    """SGLang sizes these buffers by the draft model, and by nothing where there is none."""
    prefill, decode = filled(hidden=16), filled(hidden=16)
    write_row(decode, 2, 7, read_row(prefill, 1, drafts=True), drafts=True)
    for name in DRAFT:
        assert torch.equal(getattr(decode, name)[2], getattr(prefill, name)[1])


def test_a_draft_on_decode_only_begins_with_nothing_and_not_with_another_requests():
    prefill, decode = filled(), filled(hidden=16, seeds=True)
    expected = bytes_of(decode)
    values = read_row(prefill, 1, drafts=False)
    assert not values.keys() & {*DRAFT}
    write_row(decode, 3, 7, values, drafts=True)
    for name, tensor in bytes_of(prefill).items():
        expected[name][3] = 0 if name in DRAFT else tensor[1]
    expected["output_dsa_topk_indices"][3] = 255  # -1: none, to SGLang
    assert_equal(bytes_of(decode), expected)


def test_a_draft_on_prefill_only_is_left_out():
    prefill, decode = filled(hidden=16, seeds=True), filled()
    expected = bytes_of(decode)
    write_row(decode, 3, 7, read_row(prefill, 1, drafts=True), drafts=False)
    for name, tensor in bytes_of(prefill).items():
        if name in expected and name not in DRAFT:
            expected[name][3] = tensor[1]
    assert_equal(bytes_of(decode), expected)


@pytest.mark.parametrize("one_sided", ["checksum", "seeds"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_alone_may_have_a_checksum_or_seeds(side, one_sided):
    prefill = filled(**{one_sided: side == "prefill"})
    decode = filled(**{one_sided: side == "decode"})
    write_row(decode, 0, 7, read_row(prefill, 0, drafts=True), drafts=True)
    assert torch.equal(decode.output_ids[0], prefill.output_ids[0])


@pytest.mark.parametrize(
    "values", [read_row(filled(), 0, drafts=True), {FIRST_TOKEN: 42}], ids=["row", "token"]
)
def test_seeds_and_a_checksum_of_another_request_do_not_stay(values):
    """SGLang takes seeds below 0 for none, and 0 for no checksum; all else would be used."""
    decode = filled(checksum=True, seeds=True)
    others = bytes_of(decode)["output_dsa_topk_indices"][[0, 2, 3]]
    write_row(decode, 1, 7, values, drafts=True)
    assert (decode.output_dsa_topk_indices[1] == -1).all()
    assert not decode.kv_checksum[1].view(torch.int64).any()
    assert torch.equal(bytes_of(decode)["output_dsa_topk_indices"][[0, 2, 3]], others)


def test_a_buffer_of_another_size_is_refused_before_anything_is_written():
    prefill, decode = filled(hidden=8), filled(hidden=16)
    before = bytes_of(decode)
    with pytest.raises(ValueError, match="output_hidden_states: 16 bytes on prefill, 32 bytes"):
        write_row(decode, 0, 7, read_row(prefill, 0, drafts=True), drafts=True)
    assert_equal(bytes_of(decode), before)
