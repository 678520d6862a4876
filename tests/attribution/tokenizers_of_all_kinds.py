"""Small tokenizers with the marks that exist, trained on a few lines; and slow ones, written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "Hello world, it's a naïve café 🍕 don't!",
    "pizza pizza. playing games costs 3.14 or 1,000",
    "नमस्ते हिन्दी and 日本語 text",
]


def byte_level() -> Any:
    """As of GPT-2, RoBERTa, SmolLM2: one special token for everything."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end, unk_token=end)


def word_piece() -> Any:
    """As of BERT."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=110, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name.strip('[]').lower()}_token": name for name in specials}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def sentence_piece() -> Any:
    """As of T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")


def byte_fallback() -> Any:
    """As of Llama: no pre-tokenizer, so that the tokenizer itself calls a whole text one word."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<unk>", "<s>", *fallback], show_progress=False)
    tokenizer.train_from_iterator(["hello world a game"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def word_suffix() -> Any:
    """As of the first GPT and XLM: a mark where words end."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=72, end_of_word_suffix="</w>", special_tokens=["<unk>", "<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


class Bytes:
    """As of ByT5: a slow tokenizer, each token a byte, none a mark."""

    is_fast = False
    all_special_ids = (0, 1)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return ["<pad>" if one == 0 else "</s>" if one == 1 else chr(one - 3) if one < 259 else None for one in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(token.encode("latin-1") for token in tokens).decode(errors="ignore")

    def encode(self, text: str) -> list[int]:
        return [*(byte + 3 for byte in text.encode()), 1]


ALL: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "WordPiece": word_piece,
    "SentencePiece": sentence_piece,
    "byte fallback": byte_fallback,
    "word suffix": word_suffix,
}
