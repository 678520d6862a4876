"""The bug table of other tools, rows 1 to 10: reductions, test losses, tokens, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradreg as gr
from gradreg.errors import CoupledExamplesError, ScalarError
from tests.tracin.toy import (
    LOSS,
    SEQUENCES,
    TEST,
    TOKEN_LOSS,
    TRAIN,
    XT,
    YT,
    TokenModel,
    X,
    Y,
    assert_scores,
    assert_table,
    brute,
    brute_gradients,
    made,
    padded_tokens,
    token_rows,
    toy_model,
    tracin,
)


def token_gram(model: nn.Module) -> Tensor:
    """The truth for the token model: each sequence alone, without padding."""

    def fn(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")

    rows = [torch.tensor(sequence) for sequence in SEQUENCES]
    G = brute_gradients(model, rows, rows, fn)
    return G @ G.T


def test_the_toy_itself() -> None:
    assert Y.tolist() == [2, 2, 0, 2, 0, 2, 0, 1, 0, 2, 0]
    assert YT.tolist() == [0, 0, 2, 0]
    assert_table(brute(toy_model()), -0.488627, 4.399817)


@pytest.mark.parametrize("size", [1, 4, 11, 16])
@pytest.mark.parametrize("form", ["chunk_size", "loader"])
def test_row_01_batch_sizes_change_nothing(size: int, form: str) -> None:
    model = toy_model()
    if form == "chunk_size":
        found = tracin(model, chunk_size=size).influence(TRAIN, TEST)
    else:
        loaders = [DataLoader(TensorDataset(*data), batch_size=size) for data in (TRAIN, TEST)]
        found = tracin(model).influence(*loaders)
    assert_table(found, -0.488627, 4.399817)
    assert_scores(found, brute(model))
    assert abs(float(found.abs().max()) - 2.686631) < 6e-7


@pytest.mark.parametrize(
    "of",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        gr.loss(nn.CrossEntropyLoss(reduction="mean")),
        lambda outputs, batch: F.cross_entropy(outputs, batch.targets, reduction="none"),
    ],
    ids=["function", "module", "sum", "loss", "callable"],
)
def test_row_01_the_own_reduction_of_a_loss_of_torch_is_not_used(of: Any) -> None:
    assert_table(tracin(toy_model(), of).influence(TRAIN, TEST), -0.488627, 4.399817)


@pytest.mark.parametrize(
    "of",
    [
        lambda outputs, batch: F.cross_entropy(outputs, batch.targets, reduction="none") / len(outputs),
        gr.loss(lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none") / len(targets)),
    ],
    ids=["of", "fn"],
)
def test_row_01_a_loss_divided_by_the_batch_is_refused_by_name(of: Any) -> None:
    with pytest.raises(ScalarError, match="divided by the number of rows"):
        tracin(toy_model(), of).influence(TRAIN, TEST)
    with pytest.raises(ScalarError, match="divided by the number of rows"):
        tracin(toy_model(), of).self_influence((X[:1], Y[:1]))


@pytest.mark.parametrize(
    "of",
    [
        lambda outputs, batch: F.cross_entropy(outputs, batch.targets),
        gr.loss(lambda outputs, targets: F.cross_entropy(outputs, targets)),
    ],
    ids=["of", "fn"],
)
def test_row_01_a_loss_of_one_number_is_refused(of: Any) -> None:
    with pytest.raises(ScalarError, match=r"must not reduce|do not reduce"):
        tracin(toy_model(), of).influence(TRAIN, TEST)


def test_row_01_a_mean_given_to_every_row_is_refused() -> None:
    def of(outputs: Tensor, batch: gr.Batch) -> Tensor:
        return F.cross_entropy(outputs, batch.targets).expand(len(batch))

    with pytest.raises(CoupledExamplesError, match="mixes examples"):
        tracin(toy_model(), of).influence(TRAIN, TEST)


def test_row_02_the_gradient_is_the_examples_own() -> None:
    model = toy_model()
    G = brute_gradients(model, X, Y)
    assert_scores(tracin(model).self_influence(TRAIN), G.square().sum(1))
    assert [round(float(s), 6) for s in tracin(model).self_influence(TRAIN)[:3]] == [1.788686, 2.005318, 1.337467]
    assert abs(float(tracin(model).self_influence(TRAIN).sum()) - 28.686189) < 6e-7


def test_row_03_per_example_gradients_sum_to_that_of_the_sum() -> None:
    model = toy_model()
    parameters = list(model.parameters())
    total = torch.autograd.grad(F.cross_entropy(model(X), Y, reduction="sum"), parameters)
    mean = torch.autograd.grad(F.cross_entropy(model(X), Y), parameters)
    flat = torch.cat([g.flatten() for g in total])
    assert torch.allclose(flat, 11 * torch.cat([g.flatten() for g in mean]), rtol=0, atol=1e-14)
    expected = brute_gradients(model, XT, YT) @ flat
    assert_scores(tracin(model).influence(TRAIN, TEST).sum(1), expected)
    assert_scores(tracin(model).influence(TEST, TRAIN, aggregate=True)[0], expected)


def test_row_04_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ScalarError, match="allowed are False"):
        gr.loss(F.cross_entropy, mean="avg")


def test_row_04_sum_over_mean_is_the_number_of_valid_tokens() -> None:
    model = made(TokenModel)
    ids = torch.randint(1, 9, (1, 15))
    labels = torch.cat([torch.full((1, 3), -100), ids[:, 3:]], 1)
    batch = gr.Batch(ids, labels)
    with torch.no_grad():
        total = TOKEN_LOSS(model(ids), batch)
        mean = gr.loss(F.cross_entropy, mean=True, shift=True)(model(ids), batch)
    assert abs(float(total / mean) - 12) < 1e-12


def test_row_05_another_test_loss() -> None:
    model = toy_model()
    found = tracin(model, test_of=gr.true_logit()).influence(TRAIN, TEST)
    assert_table(found, 0.535173, -3.200523)
    tests = brute_gradients(model, XT, YT, lambda outputs, labels: outputs[0, labels[0]])
    assert_scores(found, tests @ brute_gradients(model, X, Y).T)


def test_row_05_a_mean_over_an_examples_own_axes_as_test_loss() -> None:
    found = tracin(toy_model(), test_of=gr.loss(F.cross_entropy, mean=True)).influence(TRAIN, TEST)
    assert_table(found, -0.488627, 4.399817)


@pytest.mark.parametrize("tokens", [3, 9])
def test_row_06_a_mean_over_tokens_divides_by_the_sequences_own_number(tokens: int) -> None:
    model = made(TokenModel)
    ids = torch.randint(1, 9, (tokens + 1,))
    data, test = [(ids, ids)], token_rows(1)
    summed = tracin(model, TOKEN_LOSS).influence(data, test)
    mean = tracin(model, gr.loss(F.cross_entropy, mean=True, shift=True), test_of=TOKEN_LOSS).influence(data, test)
    assert_scores(summed, tokens * mean)


def test_row_06_a_padded_pair_is_each_alone() -> None:
    model = made(TokenModel)
    rows = [(ids, ids) for ids in (torch.randint(1, 9, (4,)), torch.randint(1, 9, (10,)))]
    for of in (TOKEN_LOSS, gr.loss(F.cross_entropy, mean=True, shift=True)):
        score = tracin(model, of).influence
        together = score(rows, rows)
        alone = torch.cat([torch.cat([score([a], [b]) for a in rows], 1) for b in rows])
        assert_scores(together, alone)


def test_row_07_tests_in_batches_larger_than_their_number() -> None:
    found = tracin(toy_model(), chunk_size=4).influence(TRAIN, (XT[:3], YT[:3]))
    assert_scores(found, brute(toy_model(), TRAIN, (XT[:3], YT[:3])))


@pytest.mark.parametrize("data", [token_rows(), padded_tokens()], ids=["unequal", "padded"])
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_row_07_padding_is_not_scored(data: Any, chunk_size: int | None) -> None:
    model = made(TokenModel)
    found = tracin(model, TOKEN_LOSS, chunk_size=chunk_size).influence(data, data)
    expected = {(0, 0): 10.273207, (1, 1): 41.955461, (2, 2): 19.285584}
    expected |= {(0, 1): 0.288245, (0, 2): -1.142543, (1, 2): 0.672413}
    assert {pair: round(float(found[pair]), 6) for pair in expected} == expected
    assert_scores(found, token_gram(model))
    assert_scores(tracin(model, TOKEN_LOSS).self_influence(data), token_gram(model).diagonal())


def test_row_08_token_scores() -> None:
    model, expected = made(TokenModel), [0.132309, 0.001242, 0.148934, 0.389929]
    score = tracin(model, TOKEN_LOSS).influence
    train_tokens = score(token_rows(1), token_rows(2), per="token")
    assert train_tokens.shape == (1, 1, 4)
    assert [round(float(s), 6) for s in train_tokens[0, 0]] == expected
    test_tokens = score(token_rows(2), token_rows(1), per="token", tokens="test")
    assert [round(float(s), 6) for s in test_tokens[0, 0]] == expected
    assert abs(float(train_tokens.sum()) - 0.672413) < 6e-7


@pytest.mark.parametrize("tokens", ["train", "test"])
@pytest.mark.parametrize("options", [{}, {"normalize": "cosine"}, {"normalize": "relatif"}, {"chunk_size": 1}], ids=str)
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_row_08_tokens_sum_to_the_sequence(tokens: str, options: dict[str, Any], mean: bool) -> None:
    of = gr.loss(F.cross_entropy, mean=mean, shift=True)
    score = tracin(made(TokenModel), of, **options).influence
    whole = score(token_rows(), token_rows(0, 1))
    parts = score(token_rows(), token_rows(0, 1), per="token", tokens=tokens)
    assert parts.shape == (2, 3, 4)
    assert_scores(parts.sum(2), whole)
    padded = parts[0, :, 1:] if tokens == "test" else parts[:, 0, 1:]
    assert not padded.any()


def test_row_08_a_loss_without_tokens_is_refused() -> None:
    with pytest.raises(ScalarError, match=r"one value per (example|token)"):
        tracin(toy_model()).influence(TRAIN, TEST, per="token")
    with pytest.raises(ScalarError, match="one value per example"):
        tracin(toy_model(), gr.true_logit()).influence(TRAIN, TEST, per="token")


def test_row_09_a_row_without_valid_labels_counts_nothing() -> None:
    model = made(TokenModel)
    ids, labels = padded_tokens()
    labels[1] = -100
    found = tracin(model, TOKEN_LOSS).influence((ids, labels), padded_tokens())
    assert not found[:, 1].any()
    assert_scores(found[:, [0, 2]], token_gram(model)[:, [0, 2]])
    mean = tracin(model, gr.loss(F.cross_entropy, mean=True, shift=True)).self_influence((ids, labels))
    assert float(mean[1]) == 0
    assert bool((mean[[0, 2]] > 0).all())


def test_row_10_padding_idx_has_no_gradient() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(9, 6, padding_idx=0)
            self.o = nn.Linear(6, 9)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.o(torch.tanh(self.e(ids)))
            return out

    model = made(Padded)
    ids = torch.tensor([[0, 3, 0], [2, 0, 1]])
    of = gr.loss(F.cross_entropy, axis=-1)

    def fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[0], labels[0], reduction="sum")

    G = brute_gradients(model, ids, ids, fn)
    assert not G[:, :6].any()
    assert_scores(tracin(model, of).influence((ids, ids), (ids, ids)), G @ G.T)
    layers = tracin(model, of, params="e.weight").influence((ids, ids), (ids, ids), per="layer")
    assert_scores(layers["e"], G[:, :54] @ G[:, :54].T)


def test_the_loss_of_the_toy_is_the_default_form() -> None:
    """`LOSS` is what the README shows."""
    assert_table(
        gr.TracIn(toy_model(), LOSS, {**toy_model().state_dict(), "learning_rate": 1}).influence(TRAIN, TEST),
        -0.488627,
        4.399817,
    )
