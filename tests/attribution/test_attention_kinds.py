"""Kinds of tokens as tokenizers tell them, whatever marks their tokens carry."""

from __future__ import annotations

import pytest
import torch

import gradreg as gr
from gradreg.attribution.attention._kinds import from_tokenizer
from gradreg.experiments.transformers.families import FAMILIES

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

FAMILY = {family.name: family for family in FAMILIES}


def fast(tokenizer, **special):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def word_piece():
    from tokenizers import Tokenizer, decoders, models

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "play", "##ing", ".", "##!", "don't", "¿", "$", "…", "##."]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return fast(tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"), words


def byte_level():
    from tokenizers import Tokenizer, decoders, models

    words = ["<s>", "</s>", "Ġplay", "ing", "Ġ.", ".", "ĠâĢ¦", "Ġ", "!"]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer, bos_token="<s>", eos_token="</s>"), words


def sentence_piece():
    from tokenizers import Tokenizer, decoders, models

    words = ["<pad>", "</s>", "▁play", "ing", "▁.", "?", "▁«", "▁"]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return fast(tokenizer, pad_token="<pad>", eos_token="</s>"), words


@pytest.mark.parametrize(
    ("make", "punctuation", "special"),
    [
        (word_piece, {".", "##!", "¿", "…", "##."}, ["[PAD]", "[CLS]", "[SEP]"]),
        (byte_level, {"Ġ.", ".", "ĠâĢ¦", "!"}, ["<s>", "</s>"]),
        (sentence_piece, {"▁.", "?", "▁«"}, ["<pad>", "</s>"]),
    ],
)
def test_marks_of_tokenizers_do_not_hide_punctuation(make, punctuation, special):
    tokenizer, words = make()
    ids = torch.arange(len(words)).expand(2, -1)
    kinds = from_tokenizer(tokenizer, ids)
    assert list(kinds) == [*special, "punctuation", "other"]
    found = {name: {words[n] for n in ids[0][mask[0]].tolist()} for name, mask in kinds.items()}
    assert found["punctuation"] == punctuation
    assert all(found[name] == {name} for name in special)
    assert found["other"] == set(words) - punctuation - set(special)  # an unknown word is a word
    assert torch.equal(sum(mask.long() for mask in kinds.values()), torch.ones_like(ids))


def test_padding_is_no_kind_of_its_own():
    tokenizer, _words = word_piece()
    ids = torch.tensor([[1, 4, 5, 6, 2, 0], [1, 4, 5, 7, 4, 2]])
    batch = gr.Batch({"input_ids": ids, "attention_mask": (ids != 0).long()}, torch.zeros(2, dtype=torch.long))
    report = gr.attention_report(FAMILY["BERT, classifier"].make(), batch, gr.logit(0), tokenizer=tokenizer)
    side = report.sides["self"]
    assert (side.kinds, side.absent) == (("[CLS]", "[SEP]", "punctuation", "other"), ())
    assert side.queries.tolist() == [[11, 11], [11, 11]]
    # each of 5 queries sees its [CLS], of 6 theirs; words are 2 and 3
    assert side.pairs[0, 0].tolist() == [11, 11, 11, 5 * 2 + 6 * 3]
    separators = gr.attention_report(
        FAMILY["BERT, classifier"].make(), batch, gr.logit(0), tokenizer=tokenizer, queries="[SEP]"
    )
    assert separators.sides["self"].queries.tolist() == [[2, 2], [2, 2]]


def test_a_foreign_tokenizer_is_refused():
    tokenizer, words = word_piece()
    batch = gr.Batch(torch.tensor([[1, len(words) + 3, 2]]), torch.tensor([0]))
    with pytest.raises(gr.GradregError, match="vocabulary"):
        gr.attention_report(FAMILY["BERT, classifier"].make(), batch, gr.logit(0), tokenizer=tokenizer)


def test_the_first_token_of_causal_models_is_a_kind():
    tokenizer, _words = byte_level()
    ids = torch.tensor([[1, 1, 2, 3, 4], [4, 2, 3, 2, 8], [0, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    kinds = from_tokenizer(tokenizer, ids, mask.bool(), first=True)
    assert list(kinds) == ["<s>", "first", "punctuation", "other"]
    assert kinds["first"].nonzero().tolist() == [[0, 2], [1, 0]]  # the third begins with a special token
    assert torch.equal(sum(one.long() for one in kinds.values())[mask.bool()], torch.ones(13, dtype=torch.long))
    batch = gr.Batch({"input_ids": ids, "attention_mask": mask})
    family = FAMILY["GPT-2"]
    report = gr.attention_report(family.make(), batch, lambda o, b: o.logits[:, -1, 0], tokenizer=tokenizer)
    assert report.sides["self"].kinds == ("<s>", "first", "punctuation", "other")
