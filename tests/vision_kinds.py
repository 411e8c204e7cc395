"""What tiny models of each family are made of: configuration, special tokens, processor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import tiny_tokenizer

IMAGE = tiny_tokenizer.WORDS
"""The placeholder's id: the first special token after the tokenizer's own."""

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "patch_size": 14,
}
_NORMAL = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True)
class Kind:
    config: dict[str, Any]
    special: tuple[str, ...]
    """The first is the placeholder."""
    text: str
    """How a prompt holds a picture before it is expanded."""
    pixels: dict[str, Any]
    """preprocessor_config.json."""
    processor: dict[str, Any] = field(default_factory=dict)
    """processor_config.json, where there is one."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """More of tokenizer_config.json."""


def _qwen(vision: dict[str, Any], name: str, **config: Any) -> Kind:
    marks = {
        "image_token_id": IMAGE,
        "vision_start_token_id": IMAGE + 1,
        "vision_end_token_id": IMAGE + 2,
        "video_token_id": IMAGE + 3,
    }
    shape = {"spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": 14}
    pixels = {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 28 * 28 * 64,
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": name,
        **_NORMAL,
    }
    return Kind(
        {**marks, "vision_config": shape | vision, **config},
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        pixels,
    )


def _tiles(name: str) -> Kind:
    return Kind(
        {
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "vocab_size": 320,
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_TOWER, "model_type": "idefics3", "image_size": 56},
        },
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        "<image>",
        {
            "image_processor_type": f"{name}ImageProcessor",
            "processor_class": f"{name}Processor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
            "do_image_splitting": True,
            "do_pad": True,
            **_NORMAL,
        },
        {"processor_class": f"{name}Processor", "image_seq_len": 4},
    )


def _rows(kind: str, name: str, merge: int, **config: Any) -> Kind:
    """Pictures whose rows of tokens end in a mark."""
    marks = {
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    return Kind(
        {
            "image_token_index": IMAGE,
            "vocab_size": 320,
            "vision_feature_layer": -1,
            "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 8},
            "vision_config": {
                **_TOWER,
                "model_type": "pixtral",
                "head_dim": 16,
                "image_size": 112,
                "rope_theta": 10000.0,
            },
            **config,
        },
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": name,
            "patch_size": {"height": 14, "width": 14},
            "size": {"longest_edge": 112},
            **_NORMAL,
        },
        {"processor_class": name, "patch_size": 14, "spatial_merge_size": merge, **marks},
    )


_SECTIONS = {"type": "mrope", "mrope_section": [2, 1, 1]}

KINDS: dict[str, Kind] = {
    "qwen2_vl": _qwen(
        {
            "model_type": "qwen2_vl",
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "spatial_patch_size": 14,
            "mlp_ratio": 2,
        },
        "Qwen2VLProcessor",
        **_TEXT,
        rope_scaling=_SECTIONS,
    ),
    "qwen2_5_vl": _qwen(
        {
            "model_type": "qwen2_5_vl",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_heads": 2,
            "spatial_patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        "Qwen2_5_VLProcessor",
        **_TEXT,
        rope_scaling=_SECTIONS,
    ),
    "qwen3_vl": _qwen(
        {
            "model_type": "qwen3_vl",
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_heads": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        "Qwen3VLProcessor",
        text_config={
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "head_dim": 8,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        tie_word_embeddings=False,
    ),
    "gemma3": Kind(
        {
            "image_token_index": IMAGE,
            "boi_token_index": IMAGE + 1,
            "eoi_token_index": IMAGE + 2,
            "mm_tokens_per_image": 4,
            "hidden_size": 32,
            "pad_token_id": 0,
            "vocab_size": 320,
            "text_config": {
                **_TEXT,
                "model_type": "gemma3_text",
                "num_hidden_layers": 4,
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "sliding_window": 16,
                "sliding_window_pattern": 2,
                "mm_tokens_per_image": 4,
            },
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 56},
        },
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        "<start_of_image>",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": 56, "width": 56},
            "do_pan_and_scan": False,
            "image_seq_length": 4,
            **_NORMAL,
        },
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        {
            "extra_special_tokens": {
                "image_token": "<image_soft_token>",
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
            }
        },
    ),
    "llava": Kind(
        {
            "image_token_index": IMAGE,
            "vision_feature_select_strategy": "default",
            "vision_feature_layer": -2,
            "vocab_size": 320,
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {
                **_TOWER,
                "model_type": "clip_vision_model",
                "image_size": 56,
                "projection_dim": 32,
            },
        },
        ("<image>",),
        "<image>",
        {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            **_NORMAL,
        },
        {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    ),
    "idefics3": _tiles("Idefics3"),
    "smolvlm": _tiles("SmolVLM"),
    "pixtral": _rows("pixtral", "PixtralProcessor", 1),
    "mistral3": _rows("mistral3", "Mistral3Processor", 2, spatial_merge_size=2),
    "internvl": Kind(
        {
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
            "text_config": {
                **_TEXT,
                "model_type": "qwen3",
                "head_dim": 8,
            },
            "vision_config": {**_TOWER, "model_type": "internvl_vision", "image_size": [56, 56]},
            "image_seq_length": 4,
        },
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        "<image>",
        {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "processor_class": "InternVLProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            **_NORMAL,
        },
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"pad_token": "<|endoftext|>"},
    ),
    "internvl_chat": Kind(
        {
            "image_token_index": IMAGE,
            "downsample_ratio": 0.5,
            "llm_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": {**_TOWER, "model_type": "intern_vit_6b", "image_size": 56},
            "force_image_size": 56,
        },
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        "<image>",
        {"image_processor_type": "CLIPImageProcessor", "size": 56, **_NORMAL},
        tokenizer={"pad_token": "<|endoftext|>"},
    ),
    "gemma4": Kind(
        {
            "image_token_id": IMAGE,
            "boi_token_id": IMAGE + 1,
            "eoi_token_id": IMAGE + 2,
            "audio_token_id": IMAGE + 3,
            "audio_config": None,
            "hidden_size": 32,
            "vocab_size": 320,
            "vision_soft_tokens_per_image": 8,
            "text_config": {
                **_TEXT,
                "model_type": "gemma4_text",
                "num_hidden_layers": 4,
                "head_dim": 8,
                "global_head_dim": 16,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 320,
                "sliding_window": 16,
                "sliding_window_pattern": 2,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "global_head_dim": 16,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "default_output_length": 8,
                "position_embedding_size": 64,
            },
        },
        ("<|image|>", "<|image>", "<image|>", "<|audio|>"),
        "<|image|>",
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 16,
            "max_soft_tokens": 8,
            "pooling_kernel_size": 3,
        },
        {
            "processor_class": "Gemma4Processor",
            "image_seq_length": 8,
            "image_processor": {"patch_size": 16, "max_soft_tokens": 8, "pooling_kernel_size": 3},
        },
        {
            "extra_special_tokens": {
                "image_token": "<|image|>",
                "boi_token": "<|image>",
                "eoi_token": "<image|>",
                "audio_token": "<|audio|>",
            }
        },
    ),
}

_GEMMA4 = KINDS["gemma4"]
VARIANTS: dict[str, Kind] = {
    "gemma4, both ways": replace(
        _GEMMA4,
        config=_GEMMA4.config
        | {
            "model_type": "gemma4",
            "text_config": _GEMMA4.config["text_config"]
            | {"use_bidirectional_attention": "vision"},
        },
    ),
}
"""Models of these kinds that are run in a way of their own."""
ALL = KINDS | VARIANTS
