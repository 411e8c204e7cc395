"""Models' own processors: what a prompt with pictures becomes is, token for token, what they make of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizer
from pictures import encoded, painted, png
from vision_kinds import IMAGE, KINDS

from millrace.errors import BadPicture
from millrace.media.processor import ProcessedPicture, Processor, ProcessorConfig
from millrace.protocol import to_engine
from millrace.serving.pictures import words_in
from millrace.text.pictures import Expansion
from millrace.text.tasks import TextSide, TextSideConfig

pytest.importorskip("mlx_vlm")
FIRST, SECOND = painted(120, 80), painted(60, 130, seed=2)


def folder_of(kind: str, folder: Path) -> Path:
    """All of a model but its weights."""
    made_of = KINDS[kind]
    tiny_tokenizer.write(folder, made_of.special, **made_of.tokenizer)
    config = {"model_type": kind, "eos_token_id": 2, **made_of.config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(made_of.pixels))
    if made_of.processor:
        (folder / "processor_config.json").write_text(json.dumps(made_of.processor))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_prompts_are_those_of_the_models_own_processor(kind: str, tmp_path: Path) -> None:
    import numpy as np

    folder = folder_of(kind, tmp_path / kind)
    words = words_in(folder)
    assert words is not None and words.token == IMAGE
    config = ProcessorConfig(folder=str(folder), placeholder=words.placeholder, token=words.token)
    processor = Processor(config)
    seen = {
        name: processor.seen(encoded(image), name) for name, image in (("a", FIRST), ("b", SECOND))
    }
    shown = KINDS[kind].text
    if kind == "internvl":  # its processor takes both spellings, its template writes the token
        shown = words.placeholder
    text = f"Compare\n\n{shown}\nwith {shown} here.\n"
    side = TextSide(TextSideConfig(folder=str(folder), window=4096, pictures=words))
    expansions = {name: Expansion(p.text, p.tokens, p.grid) for name, p in seen.items()}
    found = side.tokenised(text, ["a", "b"], expansions)
    together = dict(processor._processor(text=[text], images=[FIRST, SECOND]))
    assert found.tokens == np.array(together["input_ids"]).reshape(-1).tolist()
    for span, (name, picture) in zip(found.media, seen.items(), strict=True):
        own = found.tokens[span.start : span.start + span.length]
        assert span.digest == name and span.grid == picture.grid
        assert own.count(IMAGE) == picture.tokens and own[0] == own[-1] == IMAGE
    for name, picture in seen.items():
        sent = to_engine.decode(picture.picture)
        assert sent.digest == name
        assert "input_ids" not in sent.tensors and "pixel_values" in sent.tensors
        for tensor in sent.tensors.values():
            size = np.dtype(tensor.dtype).itemsize * int(np.prod(tensor.shape))
            assert len(tensor.data) == size


def test_the_front_knows_vision_models_without_loading_mlx(tmp_path: Path) -> None:
    folders = [str(folder_of(kind, tmp_path / kind)) for kind in ("qwen2_vl", "pixtral")]
    code = """
import sys
from pathlib import Path
from millrace.serving.pictures import takes_pictures, words_in
assert all(takes_pictures(Path(f)) and words_in(Path(f)) for f in sys.argv[1:])
assert not {"mlx", "mlx_lm", "mlx_vlm", "PIL"} & set(sys.modules), sorted(sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_what_a_processor_does_not_take_is_the_pictures_fault(tmp_path: Path) -> None:
    folder = folder_of("qwen2_vl", tmp_path)
    config = ProcessorConfig(folder=str(folder), placeholder="<|image_pad|>", token=IMAGE)
    processor = Processor(config)
    with pytest.raises(BadPicture, match="aspect ratio"):
        processor.seen(png(6000, 8))
    low = processor.seen(png(1200, 40), low=True)
    high = processor.seen(png(1200, 40))
    assert isinstance(low, ProcessedPicture) and low.tokens < high.tokens
