"""The bug table of other tools, rows 21 to 29 and 33: rates, signs, identities, broken rows, dominance."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import gradreg as gr
from gradreg.errors import AttributionWarning, BatchError, CheckpointError, NonFiniteLossError
from tests.tracin.toy import (
    LOSS,
    TEST,
    TRAIN,
    XT,
    YT,
    X,
    Y,
    assert_scores,
    assert_table,
    brute,
    brute_gradients,
    made,
    toy_model,
    tracin,
)


def test_row_21_a_learning_rate_beside_the_weights() -> None:
    model = toy_model()
    found = gr.TracIn(model, LOSS, {**model.state_dict(), "learning_rate": 0.1}).influence(TRAIN, TEST)
    assert_table(found, -0.048863, 0.439982)


def test_row_21_two_checkpoints() -> None:
    rates = {0: 0.1, 1: 0.05}
    checkpoints = [gr.Checkpoint(toy_model(seed).state_dict(), rate) for seed, rate in rates.items()]
    found = gr.TracIn(toy_model(7), LOSS, checkpoints).influence(TRAIN, TEST)
    assert_table(found, -0.048105, 0.746337)
    assert_scores(found, 0.1 * brute(toy_model(0)) + 0.05 * brute(toy_model(1)))


def test_row_21_no_learning_rate_is_an_error_that_says_where_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape("Checkpoint(source, learning_rate=0.1)")):
        gr.Checkpoint(toy_model().state_dict())
    torch.save(toy_model().state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt \(looked at keys 'learning_rate' and 'lr'"):
        gr.TracIn(toy_model(), LOSS, tmp_path / "model.pt")


def test_row_21_other_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    for seed, rate in ((0, 0.1), (1, 0.05)):
        torch.save({**toy_model(seed).state_dict(), "learning_rate": rate}, tmp_path / f"epoch-{seed}.pt")
    (tmp_path / "train.log").write_text("epoch 0: loss 1.1\n")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"\x00\x01")
    found = gr.TracIn(toy_model(), LOSS, tmp_path).influence(TRAIN, TEST)
    assert_table(found, -0.048105, 0.746337)


def test_row_22_positive_means_that_a_step_on_it_lowers_the_test_loss() -> None:
    model, eps = toy_model(), 1e-5
    scores = tracin(model).influence(TRAIN, TEST)
    assert [round(float(s), 6) for s in scores[:, 0]] == [-0.488627, -0.376510, 1.203900, -0.546472]
    parameters = list(model.parameters())
    with torch.no_grad():
        before = F.cross_entropy(model(XT), YT, reduction="none")
    worst = 0.0
    for i in range(11):
        gradients = torch.autograd.grad(F.cross_entropy(model(X[i : i + 1]), Y[i : i + 1]), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(eps * gradient)
            lowered = (before - F.cross_entropy(model(XT), YT, reduction="none")) / eps
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(eps * gradient)
        worst = max(worst, float((lowered - scores[:, i]).abs().max()))
    assert worst < 2.5e-5


MERGED: dict[str, Any] = {
    "ConcatDataset": ConcatDataset([TensorDataset(X[:4], Y[:4]), TensorDataset(X[4:], Y[4:])]),
    "list": [TensorDataset(X[:4], Y[:4]), TensorDataset(X[4:], Y[4:])],
    "named": {0: TensorDataset(X[:4], Y[:4]), 1: TensorDataset(X[4:], Y[4:])},
    "loader": DataLoader(ConcatDataset([TensorDataset(X[:4], Y[:4]), TensorDataset(X[4:], Y[4:])]), shuffle=True),
}


@pytest.mark.parametrize("form", MERGED)
def test_row_23_top_k_of_merged_datasets(form: str) -> None:
    model = toy_model()
    top = tracin(model).top_k(MERGED[form], TEST, 3)
    truth = brute(model)
    for test in range(4):
        order = truth[test].argsort(descending=True).tolist()
        places = [(0, column) if column < 4 else (1, column - 4) for column in order]
        assert [tuple(row) for row in top.proponents.rows[test]] == places[:3]
        assert [tuple(row) for row in top.opponents.rows[test]] == places[::-1][:3]
        assert top.proponents.columns[test].tolist() == order[:3]
        assert torch.allclose(top.proponents.scores[test], truth[test][order[:3]], atol=1e-12)


@pytest.mark.parametrize("memory", [1, 300, 2**20], ids=["one at a time", "some", "all"])
def test_row_23_top_k_in_groups_of_tests(memory: int) -> None:
    model = toy_model()
    whole = tracin(model).top_k(TRAIN, TEST, 5)
    found = tracin(model, memory=memory)
    assert torch.equal(found.top_k(TRAIN, TEST, 5).proponents.columns, whole.proponents.columns)
    assert found.top_k(TRAIN, TEST, 5, 1).rows == whole.proponents.rows
    assert found.top_k(TRAIN, TEST, 5, -1).rows == whole.opponents.rows
    together = found.top_k(TRAIN, TEST, 5, 1, aggregate=True)
    assert together.columns.tolist() == brute(model).sum(0, keepdim=True).argsort(descending=True)[:, :5].tolist()


def test_row_24_batches_of_tests_and_dropped_rows() -> None:
    model = toy_model()
    test = DataLoader(TensorDataset(*TEST), batch_size=3)
    train = DataLoader(TensorDataset(*TRAIN), batch_size=4, drop_last=True)
    found = tracin(model, chunk_size=3).influence(train, test)
    assert_scores(found, brute(model))
    assert bool(found.any(0).all())


def test_row_24_a_shuffled_loader_is_read_in_the_order_of_its_dataset() -> None:
    train = DataLoader(TensorDataset(*TRAIN), batch_size=4, shuffle=True)
    assert_table(tracin(toy_model()).influence(train, TEST), -0.488627, 4.399817)


def test_row_26_exact_by_default_and_no_shared_options() -> None:
    model = toy_model()
    projected = tracin(model, projection=gr.tracin.DenseProjection(size=4), params=["0.*"], memory="5 MB")
    assert projected.influence(TRAIN, TEST).shape == (4, 11)
    assert_scores(tracin(model).influence(TRAIN, TEST), brute(model))


@pytest.mark.parametrize("side", ["train", "test"])
@pytest.mark.parametrize("options", [{}, {"normalize": "cosine"}, {"chunk_size": 2}, {"update": "optimizer"}], ids=str)
def test_row_27_rows_with_nan_are_named(side: str, options: dict[str, Any]) -> None:
    model = toy_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    broken = X.clone()
    broken[2, 3] = torch.nan
    pair = {"train": ((broken, Y), TEST), "test": (TRAIN, (broken, Y))}[side]
    ours = gr.TracIn(model, LOSS, gr.Checkpoint(model.state_dict(), 1, optimizer=optimizer.state_dict()), **options)
    with pytest.raises(NonFiniteLossError, match=f"The gradient of {side} row 2 is NaN or infinite"):
        ours.influence(*pair)


def test_row_27_self_influence_and_layers_name_them_too() -> None:
    broken = X.clone()
    broken[[2, 4]] = torch.inf
    parts = [TensorDataset(X, Y), TensorDataset(broken, Y)]
    for call in (
        lambda: tracin(toy_model()).self_influence(parts),
        lambda: tracin(toy_model()).self_influence(parts, per="layer"),
        lambda: tracin(toy_model()).influence(parts, TEST, per="layer"),
        lambda: tracin(toy_model()).influence(parts, TEST, aggregate=True),
        lambda: tracin(toy_model()).top_k(parts, TEST, 1),
    ):
        with pytest.raises(NonFiniteLossError, match="train row 2 of dataset 1, train row 4 of dataset 1 is NaN"):
            call()


def test_row_28_norms_in_half_precision() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(100, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    rows = torch.full((2, 100), 300.0, dtype=torch.float16)
    assert rows[0].square().sum().isinf()
    ours = gr.TracIn(Weighted(), lambda outputs, batch: outputs.sum(1), gr.Checkpoint({"w": torch.zeros(100)}, 1))
    assert ours.self_influence(rows).sqrt().tolist() == [3000, 3000]
    assert ours.influence(rows, rows).tolist() == [[9e6, 9e6]] * 2
    cosine = gr.TracIn(Weighted(), lambda o, b: o.sum(1), gr.Checkpoint({"w": torch.zeros(100)}, 1), normalize="cosine")
    assert torch.allclose(cosine.influence(rows, rows), torch.ones(2, 2))


def test_row_29_duplicates_stay_separate() -> None:
    model = toy_model()
    train = (torch.cat([X, X[:1]]), torch.cat([Y, Y[:1]]))
    found = tracin(model).influence(train, TEST)
    assert found.shape == (4, 12)
    assert torch.allclose(found[:, 11], found[:, 0], rtol=0, atol=1e-14)
    assert_scores(found[:, :11], brute(model))
    top = tracin(model).top_k(train, TEST, 12)
    assert all(sorted(row.row for row in rows) == list(range(12)) for rows in top.proponents.rows)


def _dominated(factor: float) -> tuple[nn.Module, Any, Any, gr.errors.GradregError | Any]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randn(11, generator=generator, dtype=torch.float64)
    queries = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    answers = torch.randn(20, generator=generator, dtype=torch.float64)
    inputs = X.clone()
    inputs[3], targets[3] = inputs[3] * factor, targets[3] * factor
    model = made(lambda: nn.Linear(5, 1, bias=False))

    def of(outputs: Tensor, batch: gr.Batch) -> Tensor:
        return 0.5 * (outputs[:, 0] - batch.targets).square()

    return model, (inputs, targets), (queries, answers), of


def test_row_33_one_row_dominates() -> None:
    model, train, test, of = _dominated(100)
    plain = _dominated(1)
    ours = tracin(model, of)
    ratio = ours.self_influence(train)[3] / tracin(plain[0], of).self_influence(plain[1])[3]
    assert abs(float(ratio.sqrt()) / 1e4 - 1) < 1e-10
    scores = ours.influence(train, test)
    assert scores.abs().argmax(1).tolist() == [3] * 20
    found = gr.tracin.score_dominance(scores)
    assert (found.dominated, found.column, found.count, found.distinct) == (True, 3, 20, 1)
    with pytest.warns(
        AttributionWarning, match=r"Train row 3 has the largest score.* 20 of 20 tests.*normalize=\"cosine\""
    ):
        top = ours.top_k(train, test, 2)
    assert top.dominance == found


def test_row_33_cosine_does_not_see_the_scaling() -> None:
    model, train, test, of = _dominated(100)
    cosine = tracin(model, of, normalize="cosine")
    scores = cosine.influence(train, test)
    assert_scores(scores, cosine.influence(_dominated(1)[1], test))
    found = gr.tracin.score_dominance(scores)
    assert (found.dominated, found.distinct) == (False, 7)
    assert cosine.top_k(train, test, 1).dominance == found


def test_data_that_change_between_checkpoints_are_noticed() -> None:
    class Augmented(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        calls = 0

        def __len__(self) -> int:
            return 11

        def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return X[row] + (1e-3 * self.calls if row == 5 else 0), Y[row]

    with pytest.raises(BatchError, match="train row 5 is another example than when it was read before"):
        tracin(toy_model()).influence(Augmented(), TEST)


def test_cosine_relatif_and_aggregation() -> None:
    model = toy_model()
    G, T = brute_gradients(model, *TRAIN), brute_gradients(model, *TEST)
    cosine = tracin(model, normalize="cosine").influence(TRAIN, TEST)
    assert_table(cosine, -0.229015, 2.240553)
    assert_scores(cosine, F.normalize(T, dim=1) @ F.normalize(G, dim=1).T)
    assert_scores(tracin(model, normalize="relatif").influence(TRAIN, TEST), T @ F.normalize(G, dim=1).T)
    whole = tracin(model).influence(TRAIN, TEST, aggregate=True)
    assert whole.shape == (1, 11)
    assert abs(float(whole[0, 0]) + 0.207709) < 6e-7
    both = [gr.Checkpoint(toy_model(seed).state_dict(), rate) for seed, rate in ((0, 0.1), (1, 0.05))]
    expected, own = torch.zeros(4, 11, dtype=torch.float64), torch.zeros(11, dtype=torch.float64)
    cosines = torch.zeros_like(expected)
    for seed, rate in ((0, 0.1), (1, 0.05)):
        G, T = (brute_gradients(toy_model(seed), *data) for data in (TRAIN, TEST))
        expected += rate * T @ G.T
        own += rate * G.square().sum(1)
        cosines += rate * F.normalize(T, dim=1) @ F.normalize(G, dim=1).T
    assert_scores(gr.TracIn(model, LOSS, both, normalize="relatif").influence(TRAIN, TEST), expected / own.sqrt())
    assert_scores(gr.TracIn(model, LOSS, both, normalize="cosine").influence(TRAIN, TEST), cosines)
    assert_scores(gr.TracIn(model, LOSS, both).self_influence(TRAIN), own)
    together = gr.TracIn(model, LOSS, both, normalize="cosine").influence(TRAIN, TEST, aggregate=True)
    sums = sum(
        rate
        * F.normalize(brute_gradients(toy_model(s), *TEST).sum(0, keepdim=True), dim=1)
        @ F.normalize(brute_gradients(toy_model(s), *TRAIN), dim=1).T
        for s, rate in ((0, 0.1), (1, 0.05))
    )
    assert_scores(together, sums)


@pytest.mark.parametrize("normalize", [False, "cosine", "relatif"])
@pytest.mark.parametrize("aggregate", [False, True])
def test_layers_sum_to_the_total(normalize: Any, aggregate: bool) -> None:
    ours = tracin(toy_model(), normalize=normalize)
    layers = ours.influence(TRAIN, TEST, per="layer", aggregate=aggregate)
    assert list(layers) == ["0", "2"]
    assert_scores(layers["0"] + layers["2"], ours.influence(TRAIN, TEST, aggregate=aggregate))
    own = ours.self_influence(TRAIN, per="layer")
    assert_scores(own["0"] + own["2"], ours.self_influence(TRAIN))


@pytest.mark.parametrize("memory", [1, 5000, "1 GiB"])
def test_a_memory_budget_changes_nothing(memory: Any) -> None:
    both = [gr.Checkpoint(toy_model(seed).state_dict(), rate) for seed, rate in ((0, 0.1), (1, 0.05))]
    for options in ({}, {"normalize": "cosine"}, {"normalize": "relatif"}):
        small = gr.TracIn(toy_model(), LOSS, both, memory=memory, **options)
        assert_scores(
            small.influence(TRAIN, TEST), gr.TracIn(toy_model(), LOSS, both, **options).influence(TRAIN, TEST)
        )


def test_float32() -> None:
    model = toy_model().float()
    train, test = (X.float(), Y), (XT.float(), YT)
    found = tracin(model).influence(train, test)
    assert found.dtype == torch.float32
    assert_scores(found, brute(model.double()), 1e-6)
