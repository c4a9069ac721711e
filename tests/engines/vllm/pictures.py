"""A tiny model that sees, and pictures for it. Each stands for `PATCHES` tokens of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
)

SIDE, PATCH, TOKEN = 112, 8, 511
PATCHES = (SIDE // PATCH) ** 2
NAME = "<image>"


def llava(text: PreTrainedConfig) -> PreTrainedConfig:
    """A language model behind two layers of CLIP."""
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=TOKEN,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
    )


def save_processor(tokenizer: Any, place: Path) -> None:
    """What makes pixels of a picture, beside a saved model."""
    sizes = {
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
    }
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(**sizes),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=NAME,
        num_additional_image_tokens=1,
    ).save_pretrained(place)


def picture(seed: int) -> Image.Image:
    """Sixteen fields of colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((SIDE, SIDE), Image.Resampling.NEAREST)
