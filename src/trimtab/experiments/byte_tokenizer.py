"""The tokenizer of models on bytes, as an object that libraries take: token i is byte i of UTF-8."""

from __future__ import annotations

from typing import Any

from trimtab.errors import MissingExtraError

__all__ = ["NEWLINE", "byte_tokenizer"]

NEWLINE = 10
"""The byte between documents: what a text without context follows on."""


def byte_tokenizer() -> Any:
    r"""A Hugging Face tokenizer whose 256 tokens are the bytes.

    Byte 0, which no text holds, stands for the end and for padding.

    Raises: MissingExtraError: when tokenizers or transformers is not installed.

    Example:
        >>> byte_tokenizer()("é\n", add_special_tokens=False)["input_ids"] == list("é\n".encode())
        True
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise MissingExtraError("A tokenizer of bytes", "tokenizers", "demo") from None
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = _characters()[0]
    # Split, or else the letter that stands for byte 0 would be taken for it where a text has that letter.
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, split_special_tokens=True)


def _characters() -> list[str]:
    """The letter by which the library writes each byte: its own where that can be seen, or else the next free one.

    Source: the pre-tokenizer ByteLevel of the package tokenizers, after GPT-2.
    """
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    free = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(free)) for byte in range(256)]
