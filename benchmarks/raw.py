"""mlx-lm's BatchGenerator with nothing around it: `python raw.py MODEL`.

Reads one JSON line per wave, {"prompts": [...], "max_tokens": n}, inserts all prompts at once,
steps until the last has ended, and answers with the seconds it took and the tokens of each.
Prompts are tokenised before the clock starts. It knows nothing of millrace.
"""

from __future__ import annotations

import json
import sys
import time

from mlx_lm import load
from mlx_lm.generate import BatchGenerator


def main() -> None:
    model, tokenizer = load(sys.argv[1])
    generator = BatchGenerator(model, stop_tokens=[[token] for token in tokenizer.eos_token_ids])
    for line in sys.stdin:
        wave = json.loads(line)
        ids = [tokenizer.encode(prompt) for prompt in wave["prompts"]]
        start = time.perf_counter()
        generated = dict.fromkeys(generator.insert(ids, [wave["max_tokens"]] * len(ids)), 0)
        running = len(ids)
        while running:
            for response in generator.next()[1]:
                generated[response.uid] += 1
                running -= response.finish_reason is not None
        seconds = time.perf_counter() - start
        answer = {
            "seconds": seconds,
            "tokens": list(generated.values()),
            "prompt_tokens": [len(prompt) for prompt in ids],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
