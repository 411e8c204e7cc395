"""Fill-in-the-middle: which model has it, and the prompt it wants."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from millrace.text.fim import FAMILIES, Infill, infill_of
from millrace.text.tokenizer import Tokenizer


def _folder(path: Path, markers: list[str], *, bos: bool = False, spm: bool = False) -> Path:
    """A tokenizer of single letters, with the markers as tokens of their own."""
    letters = [*"abc", "▁"] if spm else [*"abc", "Ġ", "Ċ"]
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", *letters])}
    fast = Fast(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=spm))
    if spm:
        fast.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        fast.decoder = decoders.Replace("▁", " ")
    else:
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", *markers])
    if bos:
        fast.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    path.mkdir()
    fast.save(str(path / "tokenizer.json"))
    return path


def _infill(path: Path, markers: list[str], **kwargs: bool) -> tuple[Infill, Tokenizer]:
    tokenizer = Tokenizer(_folder(path, markers, **kwargs))
    found = infill_of(tokenizer)
    assert found is not None
    return found, tokenizer


def _shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(tokenizer.vocabulary.bytes_of(i).decode() for i in ids)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_family_is_found_and_its_order_kept(tmp_path: Path, family: object) -> None:
    from millrace.text.fim import FimFamily

    assert isinstance(family, FimFamily)
    markers = [m for m in (family.prefix, family.suffix, family.middle, *family.ends) if m]
    fim, tokenizer = _infill(tmp_path / "t", markers)
    assert fim.name == family.name
    shown = _shown(tokenizer, fim.prompt(tokenizer.encode("ab"), "c"))
    first, second = f"{family.prefix}ab", f"{family.suffix}c"
    if family.suffix_first:
        first, second = second, first
    assert shown == first + second + (family.middle or "")
    assert {tokenizer.vocabulary.id_of(m) for m in markers} == set(fim.ends)


def test_what_a_tokenizer_puts_first_comes_first_once(tmp_path: Path) -> None:
    fim, tokenizer = _infill(tmp_path / "t", ["[PREFIX]", "[SUFFIX]"], bos=True)
    for prefix in ("ab", ""):
        ids = tokenizer.encode(prefix, special=True)
        assert _shown(tokenizer, fim.prompt(ids, "c")) == f"<s>[SUFFIX]c[PREFIX]{prefix}"
        bare = fim.prompt(tokenizer.encode(prefix), "c")
        assert bare == fim.prompt(ids, "c")


def test_a_suffix_gets_no_space_of_the_tokenizers_own(tmp_path: Path) -> None:
    markers = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    fim, tokenizer = _infill(tmp_path / "t", markers, bos=True, spm=True)
    ids = fim.prompt(tokenizer.encode("ab", special=True), "c")
    assert _shown(tokenizer, ids) == "<s>▁<PRE> ab▁<SUF>c▁<MID>"
    spaced = fim.prompt(tokenizer.encode("a", special=True), " c")
    assert _shown(tokenizer, spaced) == "<s>▁<PRE> a▁<SUF> c▁<MID>"


def test_a_vocabulary_without_markers_has_none(tmp_path: Path) -> None:
    assert (
        infill_of(Tokenizer(_folder(tmp_path / "t", ["<|fim_prefix|>", "<|fim_suffix|>"]))) is None
    )


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen2.5", "qwen"),
        ("deepseek-v3.1", "deepseek"),
        ("mistral-nemo", "codestral"),
        ("glm-4.5v", "glm"),
        ("minimax-m2", "starcoder"),
        ("smollm2", None),
        ("llama3.2", None),
    ],
)
def test_real_vocabularies(material: Path, tmp_path: Path, name: str, family: str | None) -> None:
    with zipfile.ZipFile(material / "tokenizers" / f"{name}.zip") as archive:
        archive.extractall(tmp_path)
    (file,) = tmp_path.rglob("tokenizer.json")
    tokenizer = Tokenizer(file.parent)
    found = infill_of(tokenizer)
    assert (found.name if found else None) == family
    if found:
        prompt = found.prompt(tokenizer.encode("def f():\n", special=True), "\n\nf()\n")
        assert sum(i in found.ends for i in prompt) == (2 if family == "codestral" else 3)
        shown = _shown(tokenizer, prompt)
        assert "def f():\n" in shown and "\n\nf()\n" in shown
