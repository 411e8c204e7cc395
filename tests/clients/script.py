"""The words of the scripted model that client libraries talk to, and how its folder is written.

Run as a program (`script.py FOLDER`) by the server's own interpreter: the clients' has no MLX.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripted import Rule, call, make, think

HELLO = "Hello ☃ there, 你好."
LONG = "word " * 3000
REPORT = "It is sunny in Paris."
BOTH = "Both are mild."
THOUGHT = "Well, well."
PERSON = {"name": "Zoë", "age": 44}
PERSON_TEXT = '{"name": "Zoë", "age": 44}'
ODD_TEXT = (
    '{"größe": 2, "名前": null, "kind": "c d", "level": 3, "root": {"label": "a", "children": '
    '[{"label": "b", "children": []}]}, "shape": {"type": "circle", "radius": 1.5}'
)
ODDER_TEXT = f'{ODD_TEXT}, "counts": {{"x y": 1}}, "pair": [1, "z"]}}'

RULES = [
    Rule("assistant': 'other'", HELLO),
    Rule('"assistant": "other"', HELLO),
    Rule("hand over", call("transfer_to_other")),
    Rule("sunny", REPORT),
    Rule("mild", BOTH),
    Rule(
        "both cities",
        call("get_weather", city="Paris") + "\n" + call("get_weather", city="Rome"),
    ),
    Rule("weather", think("I must look.", call("get_weather", city="Paris"))),
    Rule("ponder", think(THOUGHT, HELLO)),
    Rule("describe by a call of Person", call("Person", **PERSON)),
    Rule("describe by a partial call", call("PartialPerson", **PERSON)),
    Rule("describe by two calls", call("Person", **PERSON) + "\n" + call("Person", **PERSON)),
    Rule("describe by a result", call("final_result", **PERSON)),
    Rule("describe several", call("IterablePerson", tasks=[PERSON, PERSON])),
    Rule("describe odd things", ODD_TEXT + "}"),
    Rule("describe odder things", ODDER_TEXT),
    Rule("describe", PERSON_TEXT),
    Rule("talk on", LONG),
    Rule("my name", "Your name is Ada."),
    Rule("", HELLO),
]

if __name__ == "__main__":
    from millrace.models.resolve import resolve

    make(Path(sys.argv[1]), resolve(None).path, RULES, "thinking")
