"""Answers that want to do harm: to run, to fetch, to hang, or to look like what they are not."""

from __future__ import annotations

import random
from collections.abc import Iterator

RUN = "globalThis.owned=1"
AWAY = "https://evil.example/x"
MARKUP = [
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f"<img src={AWAY}.png>",
    f'<svg onload="{RUN}"><use href="{AWAY}.svg#a"/></svg>',
    f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    f"<iframe src=javascript:{RUN}></iframe>",
    f'<object data="{AWAY}"></object><embed src="{AWAY}">',
    f'<link rel=stylesheet href="{AWAY}.css"><style>@import "{AWAY}.css"; * {{ display: none }}</style>',
    f'<meta http-equiv=refresh content="0;url={AWAY}">',
    f'<base href="{AWAY}/"><form action="{AWAY}"><input autofocus onfocus={RUN}></form>',
    f"<details open ontoggle={RUN}><summary>x</summary></details>",
    f'<math><mtext><a xlink:href="javascript:{RUN}">x</a></mtext></math>',
    f"<video><source onerror={RUN}></video><audio src={AWAY} onerror={RUN}></audio>",
    f"<template><script>{RUN}</script></template><noscript><p title='</noscript><script>{RUN}</script>'>",
    f"<!--<img src='--><img src=x onerror={RUN}//'>",
    f"<a href='javascript:{RUN}'>x</a>",
    "</div></article></main><h1>The page is mine</h1>",
]
LINKS = [
    f"[x](javascript:{RUN})",
    f"[x](  JaVaScRiPt:{RUN})",
    f"[x](java\tscript:{RUN})",
    f"[x](\x01javascript:{RUN})",
    f"[x](&#106;avascript:{RUN})",
    f"[x](data:text/html,<script>{RUN}</script>)",
    f"[x](vbscript:{RUN})",
    "[x](file:///etc/passwd)",
    f"[x](blob:{AWAY})",
    f"[x](//evil.example 'onmouseover={RUN}')",
    f'[x]({AWAY} "\\" onmouseover={RUN} ")',
    f"![x]({AWAY}.png)",
    "![x](data:image/svg+xml;base64,PHN2Zz48c2NyaXB0PmFsZXJ0KDEpPC9zY3JpcHQ+PC9zdmc+)",
    f"![x](javascript:{RUN})",
    f"<javascript:{RUN}>",
    f"<{AWAY}>",
    f"[![x]({AWAY}.png)](javascript:{RUN})",
    f"[a]: javascript:{RUN}\n[x][a]",
    f"[x](https://user:pass@{AWAY[8:]})",
]
FORMULAS = [
    "$\\href{javascript:alert(1)}{x}$",
    "$$\\require{html}\\style{background:url(https://evil.example/x)}{x}$$",
    "$$\\def\\x{\\x\\x}\\x$$",
    "$" + "{" * 500 + "$",
    "$$" + "\\frac{" * 200 + "$$",
    "$$\\begin{matrix}" + "&" * 900 + "\\end{matrix}$$",
    "$$\\left(\\left(\\left( x$$",
    "$$\\begin{array}{c}\\end{matrix}$$",
    "\\[ \\unicode{x3c}script\\unicode{x3e} \\]",
    "$$\\text{<script>" + RUN + "</script>}$$",
    "$^^^___$ $\\$ $\\$$ $}{$ $&$ $#$",
    "$$x" + "^2" * 300 + "$$",
    "$$x" + "^{2" * 60 + "}" * 60 + "$$",
    "\\(" * 3000,
]
BROKEN = [
    "```" * 2000,
    "```python\n" + "x = '" * 2000,
    "~~~~\n```\n~~~\n",
    "> " * 3000 + "x",
    "- " * 3000 + "x",
    "1. " * 3000 + "x",
    "".join("  " * n + "- x\n" for n in range(200)),
    "|" * 20000,
    "| a |\n|---|\n" + "| <b> |\n" * 5000,
    "|" + "a|" * 3000 + "\n|" + "-|" * 3000 + "\n" + ("|" + "b|" * 3000 + "\n") * 5,
    "*" * 50000,
    "*a **b " * 8000,
    "_" * 30000 + "a" + "_" * 30000,
    "[" * 50000,
    "![" * 20000 + "](" * 20000,
    "`" * 30001,
    "".join("`" * n + " " for n in range(1, 400)),
    "~~" * 20000,
    "\\" * 40001,
    "<" * 50000,
    "&" * 50000,
    "#" * 50000,
    "=\n" * 10000,
    "a\n" * 20000,
    "\n" * 50000,
    " " * 100000 + "x",
    "\t" * 50000 + "x",
    "https://" * 10000,
    "a@" * 20000,
    "\u202e\u2066\u200b" * 3000 + "moc.live",
    "Z" + "\u0300" * 5000,
    "\x00\x01\x02\x1b[31m\x7f\ufffe\ufdd0" * 500,
    "👩‍👩‍👧‍👦" * 3000,
    "﷽" * 3000,
    "a" * 1_000_000,
    "word " * 200_000,
    "line of text\n" * 80_000,
    "```js\n" + "const x = `${y}` // z\n" * 40_000,
    "- item **bold**\n" * 60_000,
    "| a | b |\n|--|--|\n" + "| x *y* | `z` |\n" * 60_000,
    "> quoted\n" * 100_000,
    "# heading\n" * 60_000,
]


def answers(count: int = 200, seed: int = 19) -> Iterator[str]:
    """Each alone, then mixtures of them, cut where it hurts."""
    alone = [*MARKUP, *LINKS, *FORMULAS, *BROKEN]
    yield from alone
    dice = random.Random(seed)
    short = [text for text in alone if len(text) < 20_000]
    wraps = [
        "{}",
        "> {}",
        "- {}",
        "**{}**",
        "[{}](x)",
        "| {} |\n|---|\n| {} |",
        "```html\n{}",
        "# {}",
        "${}$",
        "1. {}",
    ]
    for _ in range(count - len(alone)):
        text = "".join(
            dice.choice(wraps).replace("{}", dice.choice(short))
            + dice.choice(["", " ", "\n", "\n\n"])
            for _ in range(dice.randint(2, 8))
        )
        yield text[: dice.randint(1, len(text))]
