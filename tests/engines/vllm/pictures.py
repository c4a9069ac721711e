"""A tiny model that sees, and pictures for it. Each has `LENGTH` tokens of a prompt, of which all
but three are of patches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import (
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    Idefics3VisionConfig,
    PreTrainedConfig,
)

SIDE, PATCH, TOKEN = 112, 8, 511
PATCHES = (SIDE // PATCH) ** 2
LENGTH = PATCHES + 3
WORDS = {
    "<image>": TOKEN,
    "<fake_token_around_image>": 510,
    "<global-img>": 509,
    "<end_of_utterance>": 508,
}


def sees(text: PreTrainedConfig) -> PreTrainedConfig:
    """A language model behind two layers of an encoder."""
    vision = Idefics3VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    return Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=TOKEN,
        pad_token_id=text.pad_token_id,
        scale_factor=1,
    )


def save_processor(tokenizer: Any, place: Path) -> None:
    """What makes pixels of a picture, beside a saved model."""
    tokenizer.add_special_tokens({"additional_special_tokens": [*WORDS]})
    edges = {"longest_edge": SIDE}
    pixels = Idefics3ImageProcessorPil(size=edges, max_image_size=edges, do_image_splitting=False)
    Idefics3Processor(pixels, tokenizer, image_seq_len=PATCHES).save_pretrained(place)


def picture(seed: int) -> Image.Image:
    """Sixteen fields of colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((SIDE, SIDE), Image.Resampling.NEAREST)
