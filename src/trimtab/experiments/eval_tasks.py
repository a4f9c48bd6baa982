"""Tasks for lm-eval from a file of JSON lines: multiple choice, or the perplexity of texts; and one made by rule."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError

__all__ = ["next_sentences", "read_examples", "task_config"]

Example = dict[str, Any]


def task_config(path: Path, scratch: Path) -> dict[str, Any]:
    """What lm-eval calls a task's config, for a file of JSON lines.

    Multiple choice is judged by the likelihood of each choice behind the context and a space ("acc"), also relative to
    its length ("acc_norm"); texts by their perplexity a word and a byte.

    Args:
        path: The file.
        scratch: A folder for what is made of it; it must last as long as the task.

    Raises: ConfigError: when a line is none of the kinds, or they are of both.
    """
    examples = read_examples(path)
    name = re.sub(r"\W+", "_", path.stem)
    plain = scratch / f"{name}.jsonl"
    plain.write_text("".join(json.dumps(e) + "\n" for e in examples), encoding="utf-8")
    config: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(plain)}, "cache_dir": str(scratch / "cache")},
        "test_split": "test",
        "num_fewshot": 0,
        "metadata": {"version": 1},
    }
    if "text" in examples[0]:
        perplexities = ("word_perplexity", "byte_perplexity", "bits_per_byte")
        kind = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        return config | kind | {"metric_list": [{"metric": m} for m in perplexities]}
    kind = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    }
    shares = ("acc", "acc_norm")
    return (
        config
        | kind
        | {"metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in shares]}
    )


def read_examples(path: Path) -> list[Example]:
    """The examples of a file, each {"context", "choices", "answer"}, the answer as a number, or each {"text"}.

    Raises: ConfigError: when a line is neither, they are of both kinds, or there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("tasks", str(path), f"it cannot be read ({error}).", "Name a file of JSON lines.") from None
    examples = [_example(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not examples:
        raise ConfigError("tasks", str(path), "there is no example in it.", "Write one in a line.")
    if len({frozenset(e) for e in examples}) > 1:
        raise ConfigError("tasks", str(path), "it mixes texts and multiple choice.", "Make two files of it.")
    return examples


def _example(path: Path, number: int, line: str) -> Example:
    try:
        given = json.loads(line)
    except ValueError:
        given = None
    if isinstance(given, Mapping):
        if isinstance(given.get("text"), str) and given["text"].strip():
            return {"text": given["text"]}
        context = given.get("context", given.get("question"))
        choices = given.get("choices")
        if isinstance(context, str) and isinstance(choices, list) and len(choices) > 1:
            answer = _answer(given.get("answer"), choices)
            if all(isinstance(c, str) and c for c in choices) and answer is not None:
                return {"context": context, "choices": choices, "answer": answer}
    raise ConfigError(
        "tasks",
        f"{path}:{number}",
        'an example is {"context", "choices", "answer"}, its answer one of two or more choices, or {"text"}.',
        "Correct the line.",
    )


def _answer(given: Any, choices: Sequence[Any]) -> int | None:
    """The number of the right choice, from a number, the choice itself or a letter."""
    if given in choices and isinstance(given, str):
        return choices.index(given)
    if isinstance(given, str) and len(given) == 1 and given.isascii() and given.isalpha():
        given = ord(given.upper()) - ord("A")
    is_number = isinstance(given, int) and not isinstance(given, bool)
    return given if is_number and 0 <= given < len(choices) else None


def next_sentences(documents: Sequence[str], num_examples: int, seed: int = 0) -> list[Example]:
    """Multiple choice by rule: which of four sentences follows, the other three being of other places.

    Args:
        documents: Texts.
        num_examples: How many.
        seed: Which sentences, and in which order.

    Raises: ConfigError: when the texts hold too few sentences.

    Example:
        >>> text = " ".join(f"This is the sentence with number {i}, and it is long enough." for i in range(50))
        >>> one, = next_sentences([text], 1)
        >>> number = lambda sentence: int(sentence.split("number ")[1].split(",")[0])
        >>> number(one["choices"][one["answer"]]) == number(one["context"].split(". ")[-1]) + 1
        True
    """
    generator = random.Random(seed)
    runs, others = [], []
    for document in documents:
        sentences = [" ".join(s.split()) for s in re.split(r"(?<=[.?!])\s+", document)]
        is_whole = [_is_whole(s) for s in sentences]
        others += [s for s, whole in zip(sentences, is_whole, strict=True) if whole]
        runs += [sentences[i : i + 3] for i in range(len(sentences) - 2) if all(is_whole[i : i + 3])]
    if len(runs) < num_examples or len(others) < 10:
        raise ConfigError("num_examples", num_examples, f"the texts hold {len(runs)} places for one.", "Ask for fewer.")
    examples = []
    for first, second, right in generator.sample(runs, num_examples):
        wrong = generator.sample([s for s in others if s not in (first, second, right)], 3)
        choices = [right, *wrong]
        generator.shuffle(choices)
        examples.append({"context": f"{first} {second}", "choices": choices, "answer": choices.index(right)})
    return examples


def _is_whole(sentence: str) -> bool:
    """Whether it is one sentence, of middling length, and no heading and no piece that ends in an abbreviation."""
    words = sentence.split()
    if not 40 <= len(sentence) <= 240 or not sentence[0].isupper() or sentence[-1] not in ".?!":
        return False
    first, last = words[0], words[-1][:-1]
    return not (len(first) > 1 and first.isupper()) and len(last) > 3 and "." not in last
