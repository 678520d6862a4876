"""Tokens and words: every mark of every kind of tokenizer, with the text and without."""

from __future__ import annotations

import pytest
import torch

import gradreg as gr
from gradreg.attribution._words import _words_of
from gradreg.errors import GradregError

pytest.importorskip("transformers")

from tests.attribution.tokenizers_of_all_kinds import ALL, Bytes, byte_level, sentence_piece, word_piece

TEXT = "Playing games, don't pay 3.14 for naïve café 🍕 हिन्दी."
WORDS = ["Playing", "games", ",", "don't", "pay", "3.14", "for", "naïve", "café", "🍕", "हिन्दी", "."]


@pytest.fixture(scope="module", params=ALL)
def tokenizer(request):
    return ALL[request.param]()


def attributed(*rows, width=None, pad=0, left=False):
    """An attribution of random scores to token ids, padded."""
    width = width or max(map(len, rows))
    filled = [[pad] * (width - len(row)) * left + list(row) + [pad] * (width - len(row)) * (not left) for row in rows]
    real = [[left] * 0 + [n >= width - len(row) if left else n < len(row) for n in range(width)] for row in rows]
    valid = torch.tensor(real)
    scores = torch.randn(len(rows), 2, width, dtype=torch.float64)
    return gr.Attribution(
        {"embeddings": scores},
        "integrated_gradients",
        "token",
        target_axes=("class",),
        ids={"embeddings": torch.tensor(filled)},
        valid={"embeddings": valid},
    )


def sums_agree(words, tokens):
    assert torch.allclose(words.total, tokens.total, rtol=0, atol=1e-13)
    assert not words.scores.masked_select(~words.valid["embeddings"][:, None].expand_as(words.scores)).any()


def of_text(words, example=0):
    """The words of an example without special tokens."""
    specials = {"[CLS]", "[SEP]", "</s>", "<s>", "<|endoftext|>"}
    return [label for label in words.labels["embeddings"][example] if label and label not in specials]


def test_words_of_the_text(tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    a = attributed(ids, tokenizer("a")["input_ids"])
    words = a.words(tokenizer, texts=[TEXT, "a"])
    assert of_text(words) == WORDS
    assert of_text(words, 1) == ["a"]
    sums_agree(words, a)


def test_offsets_give_the_same_words(tokenizer):
    encoded = tokenizer(TEXT, return_offsets_mapping=True)
    a = attributed(encoded["input_ids"])
    words = a.words(tokenizer, texts=[TEXT])
    other = a.words(texts=[TEXT], offsets={"embeddings": torch.tensor([encoded["offset_mapping"]])})
    assert [label for label in other.labels["embeddings"][0] if label] == of_text(words)
    assert torch.equal(other.scores, words.scores)


def test_each_score_is_the_sum_of_its_tokens(tokenizer):
    """By hand: which tokens of the encoding touch the word's characters."""
    text = "playing games pizza"
    encoded = tokenizer(text, return_offsets_mapping=True)
    a = attributed(encoded["input_ids"])
    words = a.words(tokenizer, texts=[text])
    place = words.labels["embeddings"][0].index("games")
    start = text.index("games")
    touched = [  # a space of its own goes with the word behind it
        n for n, (left, right) in enumerate(encoded["offset_mapping"]) if start - 1 <= left < right <= start + 5
    ]
    assert len(touched) > 1  # more than one token, or this test would say little
    assert torch.allclose(words.scores[0, :, place], a.scores[0, :, touched].sum(-1), rtol=0, atol=1e-13)


def test_without_the_text_marks_tell_words(tokenizer):
    ids = tokenizer("don naïve games playing pizza")["input_ids"]
    a = attributed(ids)
    words = a.words(tokenizer)
    assert of_text(words) in (
        ["don", "naïve", "games", "playing", "pizza"],
        ["don", "naive", "games", "playing", "pizza"],  # what this tokenizer makes of it
    )
    sums_agree(words, a)


def test_special_tokens_stay_on_their_own():
    tokenizer = word_piece()
    ids = tokenizer("games", "pizza don't")["input_ids"]
    a = attributed(ids)
    for words in (a.words(tokenizer, texts=[("games", "pizza don't")]), a.words(tokenizer)):
        labels = words.labels["embeddings"][0]
        assert [label for label in labels if label.startswith("[")] == ["[CLS]", "[SEP]", "[SEP]"]
        assert torch.equal(words.scores[0, :, 0], a.scores[0, :, 0])
        assert torch.equal(words.scores[0, :, -1], a.scores[0, :, -1])
    assert a.words(tokenizer, texts=[("games", "pizza don't")]).labels["embeddings"][0][-2] == "don't"


def test_the_first_text_does_not_run_into_the_second():
    tokenizer = sentence_piece()
    ids = tokenizer("games", "pizza")["input_ids"]
    labels = attributed(ids).words(tokenizer, texts=[("games", "pizza")]).labels["embeddings"][0]
    assert labels == ["games", "</s>", "pizza", "</s>"]


@pytest.mark.parametrize("left", [False, True])
def test_padding_on_either_side(left):
    tokenizer = word_piece()
    rows = [tokenizer(text)["input_ids"] for text in ("pizza games", "playing")]
    a = attributed(*rows, width=20, left=left)
    words = a.words(tokenizer, texts=["pizza games", "playing"])
    assert words.labels["embeddings"] == [["[CLS]", "pizza", "games", "[SEP]"], ["[CLS]", "playing", "[SEP]", ""]]
    assert words.valid["embeddings"].tolist() == [[True] * 4, [True] * 3 + [False]]
    sums_agree(words, a)


def test_truncated_ids():
    tokenizer = word_piece()
    ids = tokenizer("pizza games playing", truncation=True, max_length=4)["input_ids"]
    words = attributed(ids).words(tokenizer, texts=["pizza games playing"])
    assert words.labels["embeddings"][0][0] == "[CLS]"
    assert words.labels["embeddings"][0][-1] == "[SEP]"


def test_an_unknown_word_has_its_text():
    tokenizer = word_piece()
    ids = tokenizer("games ☃ pizza")["input_ids"]
    assert tokenizer.unk_token_id in ids
    a = attributed(ids)
    assert "☃" in a.words(tokenizer, texts=["games ☃ pizza"]).labels["embeddings"][0]
    assert "[UNK]" in a.words(tokenizer).labels["embeddings"][0]


def test_a_letter_of_several_tokens():
    tokenizer = byte_level()
    ids = tokenizer(" 🍕")["input_ids"]
    assert len(ids) > 1
    a = attributed(ids)
    labels = a.with_tokens(tokenizer).labels["embeddings"][0]
    assert "".join(labels).encode("ascii", "ignore").decode().endswith("\\x95")
    assert a.words(tokenizer).labels["embeddings"] == [["🍕"]]


def test_labels():
    tokenizer = byte_level()
    ids = tokenizer("Hello café<|endoftext|>")["input_ids"]
    a = attributed(ids).with_tokens(tokenizer)
    assert "".join(a.labels["embeddings"][0]) == "Hello café<|endoftext|>"
    tokenizer = word_piece()
    # two pieces whatever the trainer merged: letters behind a word that is known are marked
    a = attributed(tokenizer("games" * 3)["input_ids"], width=24).with_tokens(tokenizer)
    labels = a.labels["embeddings"][0]
    assert (labels[0], labels[-1]) == ("[CLS]", "[PAD]")
    assert any(label.startswith("##") for label in labels)


def test_a_slow_tokenizer():
    tokenizer = Bytes()
    a = attributed(tokenizer.encode("naïve pizza."))
    words = a.words(tokenizer)
    assert words.labels["embeddings"] == [["naïve", "pizza", ".", "</s>"]]
    sums_agree(words, a)
    with pytest.raises(GradregError, match="not a fast tokenizer; leave out texts"):
        a.words(tokenizer, texts=["naïve pizza."])


def test_lines_and_spaces_at_the_end():
    tokenizer = byte_level()
    a = attributed(tokenizer("games\n pizza ")["input_ids"])
    assert a.words(tokenizer).labels["embeddings"] == [["games", "\n", "pizza", " "]]
    sums_agree(a.words(tokenizer), a)


def test_a_graph_goes_through():
    tokenizer = word_piece()
    ids = tokenizer("games")["input_ids"]
    scores = torch.randn(1, len(ids), requires_grad=True)
    a = gr.Attribution({"x": scores}, "saliency", "token", ids={"x": torch.tensor([ids])})
    weights = torch.tensor([1.0, 2.0, 3.0])
    (a.words(tokenizer).scores * weights).sum().backward()
    assert scores.grad.tolist() == [[1.0, *[2.0] * (len(ids) - 2), 3.0]]


def test_targets_stay_tokens():
    tokenizer = word_piece()
    rows = [tokenizer("pizza games")["input_ids"], tokenizer("pizza")["input_ids"]]
    width = len(rows[0])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    a = gr.Attribution(
        {"x": torch.randn(2, width, width)},
        "saliency",
        "token",
        target_axes=("token",),
        ids={"x": ids},
        valid={"x": ids != 0},
    )
    words = a.words(tokenizer)
    tokens = a.with_tokens(tokenizer).labels["x"]
    assert words.target_labels["token"][0] == tokens[0]
    assert words.target_labels["token"][1] == [*tokens[1][: len(rows[1])], *[None] * (width - len(rows[1]))]
    page = words.to_html()
    assert "pizza" in page


def test_keys_of_an_encoder_and_a_decoder():
    tokenizer = sentence_piece()
    source, target = (torch.tensor([tokenizer(text)["input_ids"]]) for text in ("pizza games", "café"))
    target = torch.cat([torch.tensor([[0]]), target[:, :-1]], 1)  # the decoder starts with a pad
    a = gr.Attribution(
        {"encoder": torch.randn(1, source.shape[1]), "decoder": torch.randn(1, target.shape[1])},
        "saliency",
        "token",
        ids={"encoder": source, "decoder": target},
        segments={"encoder": "source", "decoder": "target prefix"},
    )
    words = a.words(tokenizer, texts={"encoder": ["pizza games"], "decoder": ["café"]})
    assert words.labels == {"encoder": [["pizza", "games", "</s>"]], "decoder": [["<pad>", "café"]]}
    assert words.segments == a.segments
    with pytest.raises(GradregError, match="several keys, so texts is a mapping from 'encoder', 'decoder'"):
        a.words(tokenizer, texts=["pizza games"])
    with pytest.raises(GradregError, match="texts has nothing for the key 'decoder'"):
        a.words(tokenizer, texts={"encoder": ["pizza games"]})


def test_what_is_missing_is_named():
    tokenizer = word_piece()
    a = attributed(tokenizer("games")["input_ids"])
    with pytest.raises(GradregError, match=r"'embeddings', example 0: the id \d+ at position 1 is not what"):
        a.words(tokenizer, texts=["pizza"])
    with pytest.raises(GradregError, match="one text for 'embeddings'; give a list of 1"):
        a.words(tokenizer, texts="games")
    with pytest.raises(GradregError, match="2 items"):
        a.words(tokenizer, texts=["games", "pizza"])
    with pytest.raises(GradregError, match="give texts too"):
        a.words(offsets=[[(0, 1)]])
    with pytest.raises(GradregError, match="give one of the two"):
        a.words()
    with pytest.raises(GradregError, match=r"offset \(0, 50\) at position 0 lies outside"):
        a.words(texts=["games"], offsets=[[(0, 50)] * a.scores.shape[-1]])
    with pytest.raises(GradregError, match="1 offsets for"):
        a.words(texts=["games"], offsets=[[(0, 5)]])
    plain = gr.Attribution({"x": torch.ones(1, 2)}, "saliency", "token")
    with pytest.raises(GradregError, match="no token ids for 'x'"):
        plain.words(tokenizer)
    with pytest.raises(GradregError, match="no token ids, so a tokenizer cannot name"):
        plain.with_tokens(tokenizer)
    with pytest.raises(GradregError, match="The id 9999 at position 1 is not in the tokenizer's vocabulary"):
        attributed([5, 9999]).with_tokens(tokenizer)
    with pytest.raises(GradregError, match="these scores are per feature"):
        gr.Attribution({"x": torch.ones(1, 2)}, "saliency", "feature").words(tokenizer)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b", ["a", "b"]),
        ("don't 'quoted' rock'n'roll it\u2019s", ["don't", "'", "quoted", "'", "rock'n'roll", "it\u2019s"]),
        ("3.14 1,000 a.b end. 5.", ["3.14", "1,000", "a", ".", "b", "end", ".", "5", "."]),
        ("snake_case x-y", ["snake_case", "x", "-", "y"]),
        ("!!", ["!", "!"]),
        ("हिन्दी", ["हिन्दी"]),
        ("日本語", ["日", "本", "語"]),
        ("👨‍👩‍👧 👍🏽 ❤️", ["👨‍👩‍👧", "👍🏽", "❤️"]),
        ("cafe\u0301", ["cafe\u0301"]),
        ("\u0301a", ["\u0301", "a"]),
    ],
)
def test_what_a_word_is(text, words):
    found: dict[int, str] = {}
    for letter, word in zip(text, _words_of(text), strict=True):
        if word >= 0:
            found[word] = found.get(word, "") + letter
    assert list(found.values()) == words
