"""Tokens as text: what each token of a tokenizer adds to the running text, whatever marks the tokenizer uses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradreg.errors import GradregError

__all__ = ["Token", "read_tokens", "special_ids"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Token:
    """One token: its label for people, the bytes it adds to the text, and whether it is special such as `[SEP]`."""

    label: str
    data: bytes
    special: bool


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids that stand for no text. An unknown word stands for one, unless its id is used otherwise too."""
    _check_tokenizer(tokenizer)
    specials = {int(one) for one in tokenizer.all_special_ids}
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    if unknown is not None and unknown not in {getattr(tokenizer, name, None) for name in others}:
        specials.discard(int(unknown))
    return specials


def read_tokens(tokenizer: Any, ids: Sequence[int]) -> list[Token]:
    """Read token ids.

    The marks (bytes behind `Ġ`, `##` of WordPiece, `▁` of SentencePiece, `</w>`) are recognized by how the tokenizer
    itself joins two tokens, so its class does not matter. `word_ids` would: tokenizers without a pre-tokenizer, such as
    Llama's, call a whole text one word.

    Args:
        tokenizer: One of transformers, or whatever has its `convert_ids_to_tokens`, `convert_tokens_to_string` and
            `all_special_ids`.
        ids: Of one example.

    Raises:
        GradregError: If an id is not in the vocabulary.
    """
    _check_tokenizer(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    for place, token in enumerate(tokens):
        if token is None:
            raise GradregError(
                f"The id {ids[place]} at position {place} is not in the tokenizer's vocabulary; give the tokenizer "
                "that made the ids."
            )
    specials = special_ids(tokenizer)
    reader = _reader(tokenizer)
    special = [int(one) in specials for one in ids]
    texts = iter(reader([token for token, skip in zip(tokens, special, strict=True) if not skip]))
    read = []
    for token, skip in zip(tokens, special, strict=True):
        label, data = (token, b"") if skip else next(texts)
        read.append(Token(label, data, skip))
    return read


def _check_tokenizer(tokenizer: Any) -> None:
    needed = ("all_special_ids", "convert_ids_to_tokens", "convert_tokens_to_string")
    missing = [name for name in needed if not hasattr(tokenizer, name)]
    if missing:
        raise GradregError(
            f"tokenizer={tokenizer!r} is a {type(tokenizer).__name__} without {', '.join(missing)}; give a tokenizer of "
            "transformers, AutoTokenizer.from_pretrained(...)."
        )


def _reader(tokenizer: Any) -> Callable[[list[str]], list[tuple[str, bytes]]]:
    """Return what turns tokens without special ones into labels and bytes."""

    def joined(*tokens: str) -> str:
        try:
            return str(tokenizer.convert_tokens_to_string(list(tokens))).strip()
        except (KeyError, ValueError, UnicodeError):  # a slow tokenizer that does not know the tokens
            return ""

    suffix = joined("a</w>", "b</w>") == "a b"
    if joined("a", "Ġb") == "a b":
        return lambda tokens: [_labelled(_byte_level(token, suffix)) for token in tokens]
    if joined("a", "##b") == "ab":
        # the marks of WordPiece can be read; those of bytes cannot
        return lambda tokens: [
            (token, token[2:].encode() if token.startswith("##") else f" {token}".encode()) for token in tokens
        ]
    if joined("a", "▁b") == "a b":
        return lambda tokens: [_labelled(_sentence_piece(token)) for token in tokens]
    if suffix:
        return lambda tokens: [_labelled(token.replace("</w>", " ").encode()) for token in tokens]
    return lambda tokens: _by_growth(tokenizer, tokens)


def _labelled(data: bytes) -> tuple[str, bytes]:
    return data.decode("utf-8", errors="backslashreplace"), data  # part of a letter is shown as its bytes


def _byte_level(token: str, suffix: bool) -> bytes:
    end = b" " if suffix and token.endswith("</w>") else b""
    letters = token.removesuffix("</w>") if end else token
    if all(letter in _LETTER_OF_BYTE for letter in letters):
        return bytes(_LETTER_OF_BYTE[letter] for letter in letters) + end
    return letters.encode() + end  # an added token, which is stored as it is written


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _by_growth(tokenizer: Any, tokens: list[str]) -> list[tuple[str, bytes]]:
    """Read what each token adds to the text of those before; one that changes earlier text adds its own name."""
    read, before = [], ""
    for count in range(1, len(tokens) + 1):
        after = str(tokenizer.convert_tokens_to_string(tokens[:count]))
        piece = after.removeprefix(before) if after.startswith(before) else tokens[count - 1]
        read.append((piece, piece.encode()))
        before = after
    return read


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte behind every letter of a byte-level vocabulary: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_LETTER_OF_BYTE = _bytes_of_letters()
