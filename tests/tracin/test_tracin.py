"""TracIn itself: heads, data of language models, memory, options."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import Factors
from gradreg.errors import CoupledExamplesError, GradregError, ScalarError, UnknownNameError
from gradreg.tracin import _passes
from tests.tracin.toy import (
    SEQUENCES,
    TEST,
    TRAIN,
    TokenModel,
    X,
    Y,
    assert_scores,
    brute,
    made,
    toy_model,
    tracin,
)


def headed() -> gr.SharedBase:
    base = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
    return gr.SharedBase(base, [nn.Linear(7, 3) for _ in range(3)])


def test_heads_add_up() -> None:
    """The loss of an example is the sum over heads, as the gradient of a shared parameter is."""
    model = made(headed)
    assert isinstance(model, gr.SharedBase)

    def fn(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], labels.expand(3), reduction="sum")

    expected = brute(model, TRAIN, TEST, fn)
    assert_scores(tracin(model).influence(TRAIN, TEST), expected)
    assert_scores(tracin(model).influence(TRAIN, TEST, aggregate=True), expected.sum(0, keepdim=True))
    layers = tracin(model).influence(TRAIN, TEST, per="layer")
    assert list(layers) == ["base.0", "heads.0", "heads.1", "heads.2"]
    assert_scores(torch.stack(list(layers.values())).sum(0), expected)


class Classifier(nn.Module):
    """A sequence classifier called with keywords; it averages over tokens, by the mask if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.o = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        h = torch.tanh(self.e(input_ids))
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return {"logits": self.o((h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))}


def text_rows(mask: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"input_ids": s, "label": i % 3, "text": "words"} for i, s in enumerate(SEQUENCES)]
    return [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows] if mask else rows


def test_rows_of_dictionaries_are_padded_with_their_mask() -> None:
    model = made(Classifier)
    found = tracin(model).influence(text_rows(mask=True), text_rows(mask=True))
    rows = []
    for row in text_rows(mask=False):
        value = F.cross_entropy(model(torch.tensor([row["input_ids"]]))["logits"], torch.tensor([row["label"]]))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))]))
    G = torch.stack(rows)
    assert_scores(found, G @ G.T)


def test_padding_that_hardly_changes_the_loss_is_refused_by_its_gradient() -> None:
    class Faint(Classifier):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
            logits: Tensor = super().forward(input_ids, torch.ones_like(input_ids))["logits"] * 1e-4
            return {"logits": logits}

    model = made(Faint)
    with torch.no_grad():
        one, padded = (
            F.cross_entropy(model(ids)["logits"], torch.tensor([0]))
            for ids in (torch.tensor([[1, 2]]), torch.tensor([[1, 2, 0, 0, 0]]))
        )
    assert abs(float(one / padded) - 1) < 2e-5
    for order in ([0, 1, 2], [1, 0, 2]):  # the longest in the middle, and first
        rows = [text_rows(mask=True)[i] for i in order]
        with pytest.raises(CoupledExamplesError, match=r"The squared norm of the gradient of .*attention_mask missing"):
            tracin(model).influence(rows, rows)


def test_padding_that_the_model_sees_is_refused() -> None:
    with pytest.raises(CoupledExamplesError, match="is an attention_mask missing"):
        tracin(made(Classifier)).influence(text_rows(mask=False), text_rows(mask=False))
    equal = [row for row in text_rows(mask=False) if len(row["input_ids"]) == 4]
    assert tracin(made(Classifier)).influence(equal, equal).shape == (1, 1)


def test_examples_that_are_fitted_to_the_last_digit_are_no_fault() -> None:
    """In float32 a loss of 1e-7 is rounding, and may differ between batch sizes."""

    def of(outputs: Tensor, batch: gr.Batch) -> Tensor:
        values = F.cross_entropy(outputs, batch.targets, reduction="none")
        return 1e-8 * values + (1.2e-7 if len(batch) > 1 else 0.0)

    model = toy_model().float()
    assert tracin(model, of).influence((X.float(), Y), (TEST[0].float(), TEST[1])).shape == (4, 11)


def test_examples_that_are_mixed_are_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x - x.mean(0))
            return out

    with pytest.raises(CoupledExamplesError, match=r"train row \d+ is .* alone and .* beside other rows"):
        tracin(made(Mixing)).influence(TRAIN, TEST)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled])
def test_wrappers_are_taken_off(wrap: Any) -> None:
    model = toy_model()
    ours = gr.TracIn(wrap(model), gr.loss(F.cross_entropy), [gr.Checkpoint(model.state_dict(), 1)], params="0.*")
    assert_scores(ours.influence(TRAIN, TEST), tracin(model, params="0.*").influence(TRAIN, TEST))
    wrapped = gr.Checkpoint(wrap(model).state_dict(), 1)
    assert_scores(gr.TracIn(wrap(model), gr.loss(F.cross_entropy), wrapped).influence(TRAIN, TEST), brute(model))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_surrounding_modes_change_nothing(mode: Any) -> None:
    model = toy_model()
    with mode():
        data = (X.clone(), Y.clone())  # inference tensors in inference mode
        found = tracin(model).influence(data, TEST)
        together = tracin(model).influence(data, TEST, aggregate=True)
        own = tracin(model).self_influence(data)
    assert_scores(found, brute(model))
    assert_scores(together, brute(model).sum(0, keepdim=True))
    assert_scores(own, brute(model, TRAIN, TRAIN).diagonal())


def test_it_says_what_it_is() -> None:
    ours = tracin(toy_model(), normalize="cosine", params="2.*")
    assert repr(ours) == "TracIn(Sequential, 1 checkpoint, 36.4% of the parameters, normalize='cosine')"


class Watch:
    """Records how many rows a pass takes, and how many bytes of gradients are alive at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.most = 0
        self._alive: weakref.WeakSet[Factors] = weakref.WeakSet()
        collect = _passes.collect_factors

        def watched(model: nn.Module, batch: gr.Batch, *args: Any, **options: Any) -> Factors:
            found = collect(model, batch, *args, **options)
            self.rows.append(len(batch))
            self._alive.add(found)
            self.most = max(self.most, sum(factors.nbytes for factors in self._alive))
            return found

        monkeypatch.setattr(_passes, "collect_factors", watched)


@pytest.mark.parametrize("call", ["influence", "self_influence", "top_k", "aggregate"])
def test_memory_does_not_grow_with_the_training_set(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, most = toy_model(), []
    for repeats in (20, 60):
        train = (X.repeat(repeats, 1), Y.repeat(repeats))
        watch = Watch(monkeypatch)
        ours = tracin(model, memory="200 kB")
        if call == "self_influence":
            ours.self_influence(train)
        elif call == "top_k":
            ours.top_k(train, TEST, 3)
        else:
            ours.influence(train, TEST, aggregate=call == "aggregate")
        assert len(watch.rows) > 3
        most.append(watch.most)
        monkeypatch.undo()
    assert most[1] <= most[0] < 200_000


def test_tests_that_do_not_fit_are_taken_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The many rows of one side are held by the half of the budget, not by their number."""
    model, test = toy_model(), (X.repeat(50, 1), Y.repeat(50))
    watch = Watch(monkeypatch)
    found = tracin(model, memory="200 kB").influence(TRAIN, test)
    assert watch.most < 200_000
    assert_scores(found, brute(model, TRAIN, (X, Y)).repeat(50, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "l2"}, "allowed are False, 'cosine' and 'relatif'"),
        ({"update": "adam"}, "allowed are 'gradient' and 'optimizer'"),
        ({"memory": "much"}, "numbers of bytes and texts such as '500 MB'"),
        ({"memory": 0}, "numbers of bytes"),
        ({"memory": True}, "numbers of bytes"),
        ({"chunk_size": 0}, "integers from 1"),
        ({"params": []}, "allowed are globs"),
        ({"params": [3]}, "allowed are globs"),
        ({"test_of": "loss"}, "test_of='loss'"),
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradregError, match=message):
        tracin(toy_model(), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.influence(TRAIN, TEST, per="row"), "allowed are None, 'layer' and 'token'"),
        (lambda t: t.influence(TRAIN, TEST, per="token", tokens="both"), "allowed are 'train' and 'test'"),
        (lambda t: t.influence(TRAIN, TEST, per="token", tokens="test", aggregate=True), "takes the tests as one"),
        (lambda t: t.self_influence(TRAIN, per="token"), "allowed are None and 'layer'"),
        (lambda t: t.top_k(TRAIN, TEST, 0), "from 1 to the 11 training examples"),
        (lambda t: t.top_k(TRAIN, TEST, 12), "from 1 to the 11 training examples"),
        (lambda t: t.top_k(TRAIN, TEST, 3, 2), r"None \(both\), 1"),
        (lambda t: t.influence(X, TEST), "needs targets"),
    ],
)
def test_calls_are_checked(call: Any, message: str) -> None:
    with pytest.raises(GradregError, match=message):
        call(tracin(toy_model()))


def test_what_is_no_loss_or_no_parameter() -> None:
    with pytest.raises(ScalarError, match="of=3; allowed are"):
        tracin(toy_model(), 3)
    with pytest.raises(UnknownNameError, match="frozen parameters only"):
        tracin(toy_model().requires_grad_(False))
    with pytest.raises(GradregError, match="mixes the layers"):
        tracin(toy_model(), projection=gr.tracin.DenseProjection(4)).influence(TRAIN, TEST, per="layer")


def test_projections_approach_the_exact_scores() -> None:
    model = toy_model()
    exact = brute(model)
    found = tracin(model, projection=gr.tracin.DenseProjection(size=4096)).influence(TRAIN, TEST)
    assert float((found - exact).abs().max() / exact.abs().max()) < 0.1
    whole = tracin(model, projection=gr.tracin.TwoSidedProjection(left=8, right=8)).influence(TRAIN, TEST)
    assert_scores(whole, exact)  # every layer is smaller than that
    whole = tracin(model, projection=gr.tracin.TwoSidedProjection(8, 8)).influence(TRAIN, TEST, aggregate=True)
    assert_scores(whole, exact.sum(0, keepdim=True))


def test_printed_rankings_say_where_rows_lie() -> None:
    top = tracin(toy_model()).top_k({"old": (X[:4], Y[:4]), "new": (X[4:], Y[4:])}, TEST, 2)
    assert "test 0: new[6]: 2.687, new[2]: 1.457" in str(top)
    assert "The strongest example of" in str(top.dominance)


def test_tokens_of_a_padded_table_and_of_rows_agree() -> None:
    model = made(TokenModel)
    of = gr.loss(F.cross_entropy, shift=True)
    rows = [(torch.tensor(s), torch.tensor(s)) for s in SEQUENCES]
    one = tracin(model, of, chunk_size=1).influence(rows, rows, per="token")
    assert_scores(tracin(model, of).influence(rows, rows, per="token"), one)
