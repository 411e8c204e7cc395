"""What a model will take of the device's memory, told from its files before it is loaded.

Weights as placement will hold them, the least state that is of use, and what its process takes beside
them. No tensor is read and MLX is not imported: this is for the front, which divides the memory.
"""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from millrace.config import Weights
from millrace.models import blas
from millrace.models.description import parameters, tensor_heads
from millrace.models.device import host_memory
from millrace.models.files import reads_folder
from millrace.models.safetensors import TensorHead
from millrace.models.vision.families import is_proven
from millrace.models.window import read_config

MIB = 1 << 20
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
_PACKED = ("U32", "I32")
_OWN_KERNELS = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text"})
"""Kinds of models that kernels of our own run on a CPU with the weights as they are."""
_OWN_MATRICES = frozenset(
    {
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "lfm2",
        "minimax_m2",
        "phi3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
    }
)
"""Kinds of models of which those kernels run the quantised matrices, which stay packed. The rest, experts
among it, is widened to float32; tests/models/test_short_names.py compares this with what is loaded."""
_TOWERS = ("vision_tower.", "model.visual.", "visual.")
"""Weights that are not loaded where a model with a vision tower is served as text only."""
_SCALE_BITS = 0.5
"""What scales and biases add to the bits of a quantised weight, in groups of 64."""
_CPU_PROCESS, _GPU_PROCESS = 320 * MIB, 1024 * MIB
"""What an engine takes beside weights and state: the program, buffers of a step, compiled kernels."""
_SEEING_PROCESS = 256 * MIB
"""And beside that for pictures: mlx-vlm, pixels that wait, what a layer of a vision tower needs."""
_PROCESSOR = 384 * MIB
"""What the process takes in which a model's own processor runs, with a picture of 4096 by 4096 pixels; of
the host's memory, and so of no GPU that has its own."""
_MOST_LEAST_KV, _FEWEST_LEAST_KV = 256 * MIB, 4 * MIB
WIDENED_ON_CUDA = 1 << 30
"""Quantised weights that take no more than this as bfloat16 are held so on CUDA, where nobody says."""
CACHE_SHARE = 0.3
"""The part of a model's state that is kept for later requests, where nobody says."""
DRAFT_PART = 8
"""A draft's state may take this part of what there is for state, where nobody says."""
_FREED_SHARE = 10
"""Freed buffers may take this part of weights and state on a CPU."""


@dataclass(frozen=True)
class Footprint:
    weights: int
    process: int
    least_kv: int

    @property
    def fixed(self) -> int:
        return self.weights + self.weights // _FREED_SHARE + self.process

    def part(self, ranks: int, here: int) -> Footprint:
        """Of a model that is split over so many ranks, of which some are on this machine."""
        return Footprint(self.weights * here // ranks, self.process * here, self.least_kv)


@reads_folder
def footprint(folder: Path, weights: Weights = "auto", *, encodes: bool = False) -> Footprint:
    """Raises ModelError where the files are not those of a model."""
    config = read_config(folder)
    text = config | nested if isinstance(nested := config.get("text_config"), dict) else config
    return Footprint(
        weights=_weights(folder, config, text, weights, encodes),
        process=_process(is_proven(config)),
        least_kv=_least_kv(text),
    )


def estimate(
    stored: int, bits: int, kind: str, *, sees: bool, encodes: bool, experts: bool
) -> Footprint:
    """About what a model takes whose files are not here, by the size of its weights and their precision.

    With `experts`, nearly all of its weights are those of experts.
    """
    backend, weights = blas.mlx_backend(), stored
    count = int(stored * 8 / (bits + _SCALE_BITS))
    if backend not in ("metal", "cuda"):
        held = _held_on_cpu(kind, kind, sees=sees, encodes=encodes)
        if held == "widened" or (held == "matrices" and experts):
            weights = count * 4
    elif backend == "cuda" and 2 * count <= WIDENED_ON_CUDA:
        weights = count * 2
    return Footprint(weights=weights, process=_process(sees), least_kv=_MOST_LEAST_KV)


def _process(pictures: bool) -> int:
    backend = blas.mlx_backend()
    seeing = _SEEING_PROCESS + (_PROCESSOR if backend != "cuda" else 0)
    on_gpu = backend in ("metal", "cuda")
    return (_GPU_PROCESS if on_gpu else _CPU_PROCESS) + seeing * pictures


def _held_on_cpu(
    kind: object, text_kind: object, *, sees: bool, encodes: bool
) -> Literal["packed", "matrices", "widened"]:
    """What of a model stays packed on a CPU: all of it, its quantised matrices, or nothing."""
    if sees or encodes:
        return "widened"
    if text_kind in _OWN_KERNELS:
        return "packed"
    return "matrices" if kind in _OWN_MATRICES else "widened"


def _weights(
    folder: Path, config: dict[str, Any], text: dict[str, Any], wanted: Weights, encodes: bool
) -> int:
    heads, backend, pictures = tensor_heads(folder), blas.mlx_backend(), is_proven(config)
    if not pictures:
        heads = [head for head in heads if not head[0].startswith(_TOWERS)]
    if wanted == "auto":
        wanted = "keep"
        if backend == "cuda" and any(dtype in _PACKED for _, dtype, _ in heads):
            widened = 2 * parameters(heads, text)
            wanted = "bf16" if widened <= WIDENED_ON_CUDA else "keep"
        elif backend not in ("metal", "cuda"):
            kinds = config.get("model_type"), text.get("model_type")
            held = _held_on_cpu(*kinds, sees=pictures, encodes=encodes)
            if held == "matrices":
                return _with_packed_matrices(heads, text)
            wanted = "keep" if held == "packed" else "f32"
    if wanted == "keep":
        compact = sum(f.stat().st_size for f in folder.glob("packed*.safetensors"))
        return compact + sum(_stored(dtype, shape) for _, dtype, shape in heads)
    return parameters(heads, text) * (4 if wanted == "f32" else 2)


def _with_packed_matrices(heads: list[TensorHead], text: dict[str, Any]) -> int:
    """Bytes of weights of which quantised matrices are kept as they are and the rest is float32."""
    # Other modes of quantisation than the affine one have no biases, and no kernel here.
    affine = {
        n.removesuffix(".biases") for n, _, s in heads if n.endswith(".biases") and len(s) == 2
    }
    packed = [h for h in heads if h[0].rpartition(".")[0] in affine]
    rest = [h for h in heads if h[0].rpartition(".")[0] not in affine]
    return sum(_stored(dtype, shape) for _, dtype, shape in packed) + 4 * parameters(rest, text)


def _stored(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * (4 if dtype in _PACKED else _SIZES.get(dtype, 8))


def _least_kv(text: dict[str, Any]) -> int:
    """A whole window of one request, or what many conversations fit into."""
    try:
        heads = int(text["num_attention_heads"])
        shared = int(text.get("num_key_value_heads") or heads)
        size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        window = int(text["max_position_embeddings"])
        bytes = 2 * int(text["num_hidden_layers"]) * shared * size * 4 * window
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return _MOST_LEAST_KV
    return min(_MOST_LEAST_KV, max(_FEWEST_LEAST_KV, bytes))


def device_budget() -> int | None:
    """Bytes that models and their state may take of the device; None where only MLX could tell."""
    backend = blas.mlx_backend()
    if backend == "cuda":
        memory = _cuda_memory()
        return None if memory is None else memory * 9 // 10
    memory = host_memory()
    if not memory:
        return None
    return memory * 3 // 4 if backend == "metal" else memory * 4 // 5


def _cuda_memory() -> int | None:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return int(told.stdout.split()[0]) * MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
