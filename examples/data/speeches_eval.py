"""Make a task for `trimtab eval` from text that the demo holds out: which of four sentences comes next.

The speeches are works of the United States government, and in the public domain. Run:

    python examples/data/speeches_eval.py
    trimtab eval runs/mine --tasks examples/data/speeches_eval.jsonl
"""

import json
from pathlib import Path

from trimtab.experiments.eval_tasks import next_sentences
from trimtab.experiments.text import read_speeches

OUT = Path(__file__).with_name("speeches_eval.jsonl")


def main() -> None:
    # One in twenty, the middle one, is what trimtab never trains on.
    held_out = read_speeches()[10::20]
    examples = next_sentences(held_out, num_examples=100, seed=0)
    OUT.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in examples), encoding="utf-8")


if __name__ == "__main__":
    main()
