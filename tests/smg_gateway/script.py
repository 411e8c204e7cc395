"""The words of the model behind the gateway, and how its folder is written.

Run as a program (`script.py FOLDER`) by the server's own interpreter: the gateway's has no MLX.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripted import Rule, call, make

COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
GREETING = "I say hello world to you."
RAW = "1\n2\n3\n4\n"
LISTED = "".join(f"{n}\n" for n in range(1, 11))
RULES = [
    Rule(RAW, LISTED),
    Rule("Count 1-10", COUNTED),
    Rule("greet", GREETING),
    Rule("weather", call("get_weather", city="Paris")),
    # As the gateway demands a call, and words after it, which the demand does not allow.
    Rule("forced", '[{"name": "get_weather", "parameters": {"city": "Paris"}}] and more'),
    Rule("talk", "word " * 3000),
    Rule("", "Zürich: ça va? ☃☃ 你好, 世界! 😀"),
]

if __name__ == "__main__":
    from millrace.models.resolve import resolve

    make(Path(sys.argv[1]), resolve(None).path, RULES)
