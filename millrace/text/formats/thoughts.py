"""The ways families mark reasoning, as data, and the text in a template that gives each away."""

from __future__ import annotations

from collections.abc import Set

from millrace.text.formats.syntax import ThoughtSyntax

THINK = ThoughtSyntax("think", ("<think>",), ("</think>",))
MISTRAL = ThoughtSyntax("mistral", ("[THINK]",), ("[/THINK]",), lead="")
SEED = ThoughtSyntax("seed", ("<seed:think>",), ("</seed:think>",), lead="")
COMMAND = ThoughtSyntax("command-r", ("<|START_THINKING|>",), ("<|END_THINKING|>",), lead="")
GEMMA4 = ThoughtSyntax("gemma-4", ("<|channel>thought",), ("<channel|>",))
GRANITE = ThoughtSyntax(
    "granite",
    ("<think>", "Here is my thought process:", "Here's my thought process:"),
    ("</think>", "Here is my response:", "Here's my response:"),
)
APERTUS = ThoughtSyntax("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",), lead="")
APRIEL = ThoughtSyntax(
    "apriel",
    ("Here are my reasoning steps:", "<thinking>"),
    ("[BEGIN FINAL RESPONSE]", "</thinking>"),
)
MINIMAX3 = ThoughtSyntax("minimax-m3", ("<mm:think>",), ("</mm:think>",), lead="")
SOLAR = ThoughtSyntax("solar", ("<|think|>",), ("<|end|>",), lead="")
KIMI3 = ThoughtSyntax("kimi-k3", ("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",), lead="")
HUNYUAN = ThoughtSyntax("hunyuan", ("<think:opensource>",), ("</think:opensource>",), lead="")
LONGCAT = ThoughtSyntax("longcat", ("<longcat_think>",), ("</longcat_think>",))
K2_HORIZON = ThoughtSyntax(
    "k2-horizon",
    ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
    ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
)

THOUGHTS = (
    SEED, MINIMAX3, KIMI3, HUNYUAN, COMMAND, GEMMA4, MISTRAL, APERTUS, APRIEL, SOLAR, GRANITE,
    LONGCAT, K2_HORIZON, THINK,
)  # fmt: skip

_SIGNS: tuple[tuple[str, ThoughtSyntax], ...] = (
    ("<seed:think>", SEED),
    ("<mm:think>", MINIMAX3),
    ("<|START_THINKING|>", COMMAND),
    ("<|channel>", GEMMA4),
    ("[THINK]", MISTRAL),
    ("<|inner_prefix|>", APERTUS),
    ("[BEGIN FINAL RESPONSE]", APRIEL),
    ("<think:opensource>", HUNYUAN),
    ("<longcat_think>", LONGCAT),
    ("<ifm|think", K2_HORIZON),
    ("</think>", THINK),
)


def detect_thought(template: str, tokens: Set[str]) -> ThoughtSyntax | None:
    """How a model marks its reasoning, by its template first and its vocabulary second."""
    for sign, thought in _SIGNS:
        if sign in template:
            return thought
    return next((thought for sign, thought in _SIGNS if sign in tokens), None)
