"""A model folder whose answers are written down: for tests of protocols, tools and real agents.

`make` writes the folder: a tokenizer with the markers of the style, a chat template of that style,
the rules, and tests/scripted_model.py as the model's own code. Serve it with `--trust-remote-code`.
The first rule whose `when` occurs in the last user or tool turn, as rendered, decides the answer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Style = Literal["hermes", "harmony", "thinking"]
Fault = Literal["", "raise", "die", "hang"]
"""What the model does instead of going on: raises, ends its process, or is stuck, once."""


@dataclass(frozen=True)
class Rule:
    when: str
    """What the turn must contain; empty fits every turn."""
    say: str
    """The answer's text with its markup, without the end of the turn."""
    fault: Fault = ""
    after: int = 0
    """How many tokens of the answer come before the fault."""


def call(name: str, /, style: Style = "hermes", **arguments: Any) -> str:
    """A tool call as a model of that style writes it, and as its template shows it again."""
    if style == "harmony":
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
        return f"{header}<|message|>{json.dumps(arguments, ensure_ascii=False)}<|call|>"
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def think(thought: str, answer: str, style: Style = "thinking") -> str:
    """A thought and what follows it: a text, or a call."""
    if style == "harmony":
        final = answer if "<|message|>" in answer else f"<|channel|>final<|message|>{answer}"
        return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{final}"
    return f"<think>\n{thought}\n</think>\n\n{answer}"


def make(
    folder: Path,
    tokenizer_of: Path,
    rules: Sequence[Rule],
    style: Style = "hermes",
    window: int = 65536,
) -> Path:
    """Write the model into `folder`; `tokenizer_of` is a folder with a ChatML tokenizer."""
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(folder, tokenizer_of, style)
    ends = ["<|return|>", "<|call|>"] if style == "harmony" else ["<|im_end|>"]
    config = {
        "model_type": "scripted",
        "model_file": "scripted_model.py",
        "vocab_size": max(ids.values()) + 1,
        "max_position_embeddings": window,
        "eos_token_id": [ids[end] for end in ends],
    }
    script = {"style": style, "rules": [asdict(rule) for rule in rules]}
    template = _HARMONY if style == "harmony" else _CHATML % _THOUGHTS[style]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "script.json").write_text(json.dumps(script))
    (folder / "chat_template.jinja").write_text(template)
    shutil.copy(Path(__file__).with_name("scripted_model.py"), folder)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {"layers.0.weight": mx.ones((1,))},
        metadata={"format": "mlx"},
    )
    return folder


_HARMONY_TOKENS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
)  # fmt: skip
_CALL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THOUGHT_TOKENS = ("<think>", "</think>")


def _write_tokenizer(folder: Path, source: Path, style: Style) -> dict[str, int]:
    """Copy it, with the style's markers as tokens of their own; returns all ids."""
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids = {t["content"]: t["id"] for t in tokenizer["added_tokens"]} | tokenizer["model"]["vocab"]
    markers = {
        "harmony": _HARMONY_TOKENS,
        "hermes": _CALL_TOKENS,
        "thinking": _CALL_TOKENS + _THOUGHT_TOKENS,
    }[style]
    for text in markers:
        if text in ids:
            continue
        ids[text] = max(ids.values()) + 1
        tokenizer["added_tokens"].append(
            {
                "id": ids[text],
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": style == "harmony",
            }
        )
    settings.pop("chat_template", None)
    settings["eos_token"] = "<|return|>" if style == "harmony" else "<|im_end|>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return ids


_CHATML = """
{%%- set ns = namespace(query=-1, open=false) %%}
{%%- for m in messages %%}
{%%- if m.role == 'user' %%}{%% set ns.query = loop.index0 %%}{%% endif %%}
{%%- endfor %%}
{%%- set lead = messages[0].role == 'system' %%}
{%%- if lead or tools %%}
{{- '<|im_start|>system' }}
{%%- if lead %%}{{ '\\n' ~ messages[0].content }}{%% endif %%}
{%%- if tools %%}
{{- '\\n# Tools\\nAnswer with <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>.' }}
{{- '\\n<tools>' }}
{%%- for tool in tools %%}{{ '\\n' ~ tool | tojson }}{%% endfor %%}
{{- '\\n</tools>' }}
{%%- endif %%}
{{- '<|im_end|>\\n' }}
{%%- endif %%}
{%%- for m in (messages[1:] if lead else messages) %%}
{%%- set at = loop.index0 + (1 if lead else 0) %%}
{%%- if m.role == 'tool' %%}
{%%- if not ns.open %%}{{ '<|im_start|>user' }}{%% endif %%}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%%- set ns.open = loop.nextitem is defined and loop.nextitem.role == 'tool' %%}
{%%- if not ns.open %%}{{ '<|im_end|>\\n' }}{%% endif %%}
{%%- else %%}
{{- '<|im_start|>' ~ m.role ~ '\\n' }}
{%%- if m.role == 'assistant' %%}%(history)s{%% endif %%}
{{- m.content or '' }}
{%%- for call in m.tool_calls or [] %%}
{%%- if m.content or not loop.first %%}{{ '\\n' }}{%% endif %%}
{{- '<tool_call>\\n{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' }}
{{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
{%%- endfor %%}
{{- '<|im_end|>\\n' }}
{%%- endif %%}
{%%- endfor %%}
{%%- if add_generation_prompt %%}
{{- '<|im_start|>assistant\\n' }}%(opening)s
{%%- endif %%}
"""

_THOUGHTS: dict[str, dict[str, str]] = {
    "hermes": {"history": "", "opening": ""},
    # Thoughts are shown again only while the turn they belong to goes on.
    "thinking": {
        "history": "{%- if m.reasoning_content and at > ns.query %}"
        "{{ '<think>\\n' ~ m.reasoning_content.strip('\\n') ~ '\\n</think>\\n\\n' }}{% endif %}",
        "opening": "{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    },
}

_HARMONY = """
{%- set ns = namespace(name='') %}
{{- '<|start|>system<|message|>You are a test.\\nReasoning: ' ~ reasoning_effort | default('medium') }}
{{- '\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
{{- '<|start|>developer<|message|># Tools\\n## functions\\nnamespace functions {' }}
{%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}
{{- '\\n}<|end|>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role in ('system', 'developer') %}
{{- '<|start|>developer<|message|># Instructions\\n' ~ m.content ~ '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' ~ ns.name ~ ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content ~ '<|end|>' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- if m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}
{%- endif %}
{%- if m.content %}
{{- '<|start|>assistant<|channel|>commentary<|message|>' ~ m.content ~ '<|end|>' }}
{%- endif %}
{%- for call in m.tool_calls %}
{%- set ns.name = call.function.name %}
{{- '<|start|>assistant<|channel|>commentary to=functions.' ~ ns.name ~ ' <|constrain|>json' }}
{{- '<|message|>' ~ call.function.arguments | tojson ~ '<|call|>' }}
{%- endfor %}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' }}
{%- else %}
{{- '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
