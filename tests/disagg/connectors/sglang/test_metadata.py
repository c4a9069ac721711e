"""The row of SGLang's metadata travels by name."""

from __future__ import annotations

import pytest
import torch

from disagg.connectors.sglang.metadata import FIRST_TOKEN, read_row, write_row


class Buffers:
    """As SGLang's `MetadataBuffers`: tensors `[row, ...]`, some only with an option."""

    def __init__(self, *, hidden: int = 8, mask: bool = False, checksum: bool = False) -> None:
        self.enable_sampling_mask = mask
        self.output_ids = torch.zeros((4, 16), dtype=torch.int32)
        self.output_token_logprobs_val = torch.zeros((4, 16))
        self.output_token_sampling_mask_idx = torch.zeros((4, 8), dtype=torch.int32)
        if not mask:
            self.output_token_sampling_mask_idx = None
        self.output_hidden_states = torch.zeros((4, hidden), dtype=torch.bfloat16)
        self.bootstrap_room = torch.zeros((4, 8), dtype=torch.uint64)
        self.kv_checksum = torch.zeros((4, 8), dtype=torch.uint64) if checksum else None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: value for n, value in vars(self).items() if isinstance(value, torch.Tensor)}


def filled(**more: int) -> Buffers:
    made = Buffers(**more)
    random = torch.Generator().manual_seed(1)
    for tensor in made.tensors().values():
        for row in tensor.view(torch.uint8).view(len(tensor), -1):
            row.copy_(torch.randint(0, 100, row.shape, dtype=torch.uint8, generator=random))
    return made


def test_a_row_comes_to_decodes_row_and_to_no_other():
    prefill, decode = filled(), filled()
    before = {name: tensor.clone() for name, tensor in decode.tensors().items()}
    write_row(decode, 3, 7, read_row(prefill, 1))
    for name, tensor in decode.tensors().items():
        there = prefill.tensors()[name]
        assert torch.equal(tensor[3].view(torch.uint8), there[1].view(torch.uint8)), name
        assert torch.equal(tensor[:3].view(torch.uint8), before[name][:3].view(torch.uint8)), name


def test_any_engine_can_read_the_first_token():
    prefill = filled()
    assert read_row(prefill, 2)[FIRST_TOKEN] == prefill.output_ids[2, 0].item()


def test_of_another_engine_the_first_token_is_enough():
    decode = filled()
    write_row(decode, 1, 2**60, {FIRST_TOKEN: 42})
    assert decode.output_ids[1].tolist() == [42] + [0] * 15
    assert decode.bootstrap_room[1].tolist() == [2**60] + [0] * 7
    assert not decode.output_token_logprobs_val[1].any()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_buffer_that_one_side_lacks_is_refused_by_name(side):
    """SGLang pairs them by position: all that follow would land in their neighbours."""
    prefill, decode = filled(mask=side == "prefill"), filled(mask=side == "decode")
    before = {name: tensor.clone() for name, tensor in decode.tensors().items()}
    with pytest.raises(ValueError, match=f"output_token_sampling_mask_idx: {side} has it"):
        write_row(decode, 0, 7, read_row(prefill, 0))
    for name, tensor in decode.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_alone_may_have_a_checksum(side):
    prefill, decode = filled(checksum=side == "prefill"), filled(checksum=side == "decode")
    write_row(decode, 0, 7, read_row(prefill, 0))
    assert torch.equal(decode.output_ids[0], prefill.output_ids[0])


def test_a_buffer_of_another_size_is_refused_before_anything_is_written():
    prefill, decode = filled(hidden=8), filled(hidden=16)
    before = decode.output_ids.clone()
    with pytest.raises(ValueError, match="output_hidden_states: 16 bytes on prefill, 32 bytes"):
        write_row(decode, 0, 7, read_row(prefill, 0))
    assert torch.equal(decode.output_ids, before)
