"""An engine imports mlx-lm's models and not its tokenizers; who asks for these gets them."""

from __future__ import annotations

import subprocess
import sys

_LOADED = "print('transformers' in sys.modules)"


def _run(code: str) -> list[str]:
    lines = f"import sys\nfrom millrace.models.lean import defer_tokenizers\n{code}"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_models_are_imported_without_tokenizers_which_come_when_asked_for() -> None:
    assert _run(
        f"""
defer_tokenizers()
import millrace.models.load, millrace.engine.loop, mlx_lm.models.llama, mlx_lm
{_LOADED}
assert mlx_lm.utils.load_model is millrace.models.load.load_model
print(mlx_lm.__version__ and callable(mlx_lm.generate))
{_LOADED}
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm import load, stream_generate
print(TokenizerWrapper.__name__)
"""
    ) == ["False", "True", "True", "TokenizerWrapper"]


def test_the_tokenizers_can_be_asked_for_by_themselves() -> None:
    assert _run(
        """
defer_tokenizers()
import mlx_lm.utils
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
print(BPEStreamingDetokenizer.__module__)
try:
    mlx_lm.utils._load_tokenizer("/nowhere")
except Exception as error:
    print("real" if "stand" not in str(error).lower() else error)
"""
    ) == ["mlx_lm.tokenizer_utils", "real"]


def test_nothing_happens_where_mlx_lm_is_there_already() -> None:
    assert _run(
        "import mlx_lm\nmine = mlx_lm\ndefer_tokenizers()\nprint(sys.modules['mlx_lm'] is mine)"
    ) == ["True"]
