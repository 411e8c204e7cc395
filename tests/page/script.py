"""The words of the scripted model that the page's tests talk to, and how the models' folders are written.

Run as a program (`script.py FOLDER`) by the server's own interpreter: the browser's has no MLX.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripted import Rule, call, make, think

ANSWER = """A millrace is the channel that leads water to a mill's wheel.

## How fast it runs

The flow through it follows *Manning's formula*:

$$v = \\frac{1}{n} R_h^{2/3} \\sqrt{S}$$

where $R_h$ is the hydraulic radius and $S$ the slope. For a wooden race:

| material | n | flow |
|:--|--:|--:|
| planed wood | 0.012 | 1.9 m/s |
| masonry | 0.025 | 0.9 m/s |

```python
def flow(n: float, radius: float, slope: float) -> float:
    \"\"\"Metres a second.\"\"\"
    return radius ** (2 / 3) * slope ** 0.5 / n  # Manning
```

1. Keep the bed **smooth**.
2. Keep the slope *even*:
   - measure it,
   - then line it.

> The old millers knew it without the formula.
"""
SECOND = "Once more: it is the water's way to the wheel."
LONG = "".join(f"The wheel turns and the water runs in year {n}. " for n in range(1, 301))
LOOP = "The wheel goes round and round. " * 300
THOUGHT = "The user asks about mills. I should be brief, and right about the formula."
RULES = [
    Rule("mills", think(THOUGHT, ANSWER)),
    Rule("long", LONG),
    Rule("circles", LOOP),
    Rule("weather", call("weather", place="Delft")),
    Rule("sunny", "It is **sunny** in Delft."),
    Rule("edited", "This answers the edited question."),
    Rule("", SECOND),
]


def main(folder: Path) -> None:
    import vision_models
    from api import tiny_folder

    from millrace.models.resolve import resolve

    default = resolve(None).path
    built_in = folder / "visit" / "models" / "smollm2"
    built_in.parent.mkdir(parents=True)
    built_in.symlink_to(default)
    tiny_folder.make(folder / "fetchable", default)
    make(folder / "miller", default, RULES, "thinking")
    make(folder / "second", default, [Rule("", SECOND)], "hermes")
    recommended = {"temperature": 0.3, "top_p": 0.85, "top_k": 40}
    (folder / "second" / "generation_config.json").write_text(json.dumps(recommended))
    vision_models.write("qwen2_vl", folder / "seer")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
