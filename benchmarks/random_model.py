"""A model folder with random weights in the shape of Qwen3-8B, to be measured over HTTP without a download.

`python benchmarks/random_model.py FOLDER --tokenizer FOLDER [--small] [--bits 4]`
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import cuda
import mlx.core as mx
from mlx.utils import tree_flatten

from millrace.models import device


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a folder with tokenizer.json"
    )
    parser.add_argument("--bits", type=int, help="of quantised weights; bfloat16 without")
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script")
    options = parser.parse_args()
    tokenizer = json.loads((options.tokenizer / "tokenizer.json").read_text())
    shape = cuda.QWEN3_8B | (cuda.SMALL if options.small else {})
    words = len(tokenizer["model"]["vocab"]) + len(tokenizer.get("added_tokens", []))
    shape["vocab_size"] = max(words, int(cuda.QWEN3_8B["vocab_size"]))
    model = cuda.build(shape, options.bits)
    if options.bits:
        shape["quantization"] = {"group_size": 64, "bits": options.bits}
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (options.tokenizer / name).exists():
            shutil.copy(options.tokenizer / name, options.folder / name)
    (options.folder / "config.json").write_text(json.dumps(shape, indent=1))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(options.folder / "model.safetensors"), weights, {"format": "mlx"})


if __name__ == "__main__":
    device.before_import()
    main()
