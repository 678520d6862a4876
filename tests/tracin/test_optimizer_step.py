"""Row 34 of the bug table: the direction of a step of the saved optimizer is that of torch.optim itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import gradreg as gr
from gradreg.errors import CheckpointError, GradregError
from tests.tracin.toy import (
    LOSS,
    TEST,
    TRAIN,
    Tied,
    TokenModel,
    Unused,
    X,
    Y,
    assert_scores,
    brute_gradients,
    made,
    token_rows,
    toy_model,
)

Make = Callable[[Iterable[Any]], Optimizer]


def trained(make: Make, model: nn.Module, steps: int = 5) -> Optimizer:
    """The optimizer after full-batch steps of the mean loss."""
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def real_direction(model: nn.Module, optimizer: Optimizer, row: int, rate: float) -> Tensor:
    """(before - after) / lr of one real step on one example, of copies."""
    model, before = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
    again = type(optimizer)(model.parameters(), lr=rate)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.zero_grad()
    F.cross_entropy(model(X[row : row + 1]), Y[row : row + 1]).backward()
    again.step()
    return torch.cat(
        [(old - new.detach()).flatten() / rate for old, new in zip(before, model.parameters(), strict=True)]
    )


def steps_of(model: nn.Module, optimizer: Optimizer, rate: float) -> Tensor:
    return torch.stack([real_direction(model, optimizer, row, rate) for row in range(11)])


def ours(model: nn.Module, optimizer: Any, rate: float = 1.0, **options: Any) -> gr.TracIn:
    checkpoint = gr.Checkpoint(model.state_dict(), rate, optimizer=optimizer)
    return gr.TracIn(model, options.pop("of", LOSS), checkpoint, update="optimizer", **options)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-3, weight_decay=0.0)


def test_row_34_exact_values() -> None:
    model = toy_model()
    optimizer = trained(adamw, model)
    direction = real_direction(model, optimizer, 0, 1e-3)
    assert abs(float(direction.norm()) - 5.3506343) < 6e-8  # the table has 5.350635, one too many in the last digit
    assert abs(float(direction[0]) + 0.249160) < 6e-7
    found = ours(model, optimizer.state_dict()).influence(TRAIN, TEST)
    assert abs(float(found[0, 0]) - 0.628863) < 6e-7
    assert abs(float(found[:, 0].sum()) - 2.999209) < 6e-7
    # (before - after) / lr loses about 13 digits of 16 to the subtraction
    assert_scores(found, brute_gradients(model, *TEST) @ steps_of(model, optimizer, 1e-3).T, 1e-11)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "AdamW amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True, betas=(0.5, 0.6)),
    "Adam with decay": lambda p: Adam(p, lr=0.01, weight_decay=0.1, eps=1e-3),
    "Adam maximize": lambda p: Adam(p, lr=0.01, maximize=True),
    "SGD": lambda p: SGD(p, lr=0.01),
    "SGD with decay": lambda p: SGD(p, lr=0.01, weight_decay=0.1),
    "SGD momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "SGD dampening": lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "SGD nesterov": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "SGD maximize": lambda p: SGD(p, lr=0.01, momentum=0.5, maximize=True),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_row_34_the_step_is_that_of_torch_optim(name: str, steps: int) -> None:
    model = toy_model()
    optimizer = trained(OPTIMIZERS[name], model, steps)
    T, U = brute_gradients(model, *TEST), steps_of(model, optimizer, 0.01)
    assert_scores(ours(model, optimizer.state_dict(), 0.5).influence(TRAIN, TEST), 0.5 * T @ U.T, 1e-9)
    cosine = F.normalize(T, dim=1) @ F.normalize(U, dim=1).T
    assert_scores(ours(model, optimizer.state_dict(), normalize="cosine").influence(TRAIN, TEST), cosine, 1e-9)
    own = (brute_gradients(model, *TRAIN) * U).sum(1)
    assert_scores(ours(model, optimizer.state_dict()).self_influence(TRAIN), own, 1e-9)


@pytest.mark.parametrize("build", [Unused, Tied], ids=["unused", "tied"])
def test_unused_and_tied_parameters(build: Callable[[], nn.Module]) -> None:
    model = made(build)
    optimizer = trained(lambda p: AdamW(p, lr=0.01, weight_decay=0.1), model)
    T, U = brute_gradients(model, *TEST), steps_of(model, optimizer, 0.01)
    assert_scores(ours(model, optimizer.state_dict()).influence(TRAIN, TEST), T @ U.T, 1e-9)


def test_layers_aggregation_and_chunks() -> None:
    model = toy_model()
    state = trained(adamw, model).state_dict()
    whole = ours(model, state).influence(TRAIN, TEST)
    layers = ours(model, state, chunk_size=3).influence(TRAIN, TEST, per="layer")
    assert_scores(layers["0"] + layers["2"], whole)
    assert_scores(ours(model, state).influence(TRAIN, TEST, aggregate=True), whole.sum(0, keepdim=True))
    first = ours(model, state, params="0.*").influence(TRAIN, TEST)
    assert_scores(first, layers["0"])


def hugging_face_groups(model: nn.Module) -> list[dict[str, Any]]:
    """With and without weight decay, as the Trainer groups parameters: not in the order of the model."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("named", [False, True])
def test_parameters_in_the_order_of_the_groups(named: bool) -> None:
    model = toy_model()

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        if not named:
            return hugging_face_groups(net)
        both = list(net.named_parameters())
        return [{"params": both[2:], "weight_decay": 0.1}, {"params": both[:2], "weight_decay": 0.0}]

    optimizer = AdamW(groups(model), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    rows = []
    for row in range(11):
        net = copy.deepcopy(model)
        again = AdamW(groups(net), lr=0.01)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again.zero_grad()
        F.cross_entropy(net(X[row : row + 1]), Y[row : row + 1]).backward()
        again.step()
        pairs = zip(model.parameters(), net.parameters(), strict=True)
        rows.append(torch.cat([(old - new).detach().flatten() / 0.01 for old, new in pairs]))
    expected = brute_gradients(model, *TEST) @ torch.stack(rows).T
    assert_scores(ours(model, optimizer.state_dict()).influence(TRAIN, TEST), expected, 1e-9)


def square_model() -> nn.Module:
    return made(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)))


def test_an_order_that_cannot_be_told_is_asked_for() -> None:
    """Without names and in an order of its own, shapes fit the wrong parameters: nothing is guessed."""
    model = square_model()
    parameters = dict(model.named_parameters())
    order = ["2.weight", "0.bias", "0.weight", "2.bias", "4.weight", "4.bias"]
    optimizer = Adam(
        [{"params": [parameters[n] for n in order[:2]]}, {"params": [parameters[n] for n in order[2:]]}], lr=0.01
    )
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    state = optimizer.state_dict()
    checkpoint = gr.Checkpoint(model.state_dict(), 1, optimizer=state, optimizer_parameters=order)
    found = gr.TracIn(model, LOSS, checkpoint, update="optimizer").influence(TRAIN, TEST)
    named = copy.deepcopy(state)
    named["param_groups"][0]["param_names"], named["param_groups"][1]["param_names"] = order[:2], order[2:]
    assert_scores(ours(model, named).influence(TRAIN, TEST), found)
    wrong = gr.Checkpoint(model.state_dict(), 1, optimizer=state, optimizer_parameters=order[::-1])
    with pytest.raises(CheckpointError, match="optimizer_parameters does not fit the optimizer: exp_avg of"):
        gr.TracIn(model, LOSS, wrong, update="optimizer").influence(TRAIN, TEST)


def test_groups_without_any_state_are_not_guessed() -> None:
    """Before the first step no shape is saved, and two groups of equal sizes may be in several orders."""
    model = toy_model()
    state = SGD(hugging_face_groups(model), lr=0.1).state_dict()
    with pytest.raises(CheckpointError, match="several orders fit"):
        ours(model, state).influence(TRAIN, TEST)


def test_an_optimizer_of_some_parameters() -> None:
    model = toy_model()
    optimizer = Adam(model[2].parameters(), lr=0.01)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match="none of the usual orders fits"):
        ours(model, optimizer.state_dict()).influence(TRAIN, TEST)
    given = gr.Checkpoint(
        model.state_dict(), 1, optimizer=optimizer.state_dict(), optimizer_parameters=["2.weight", "2.bias"]
    )
    with pytest.raises(CheckpointError, match=r"does not train '0\.weight'"):
        gr.TracIn(model, LOSS, given, update="optimizer").influence(TRAIN, TEST)
    assert gr.TracIn(model, LOSS, given, update="optimizer", params="2.*").influence(TRAIN, TEST).shape == (4, 11)


def test_what_is_refused() -> None:
    model = toy_model()
    with pytest.raises(CheckpointError, match="comes without an optimizer"):
        ours(model, None).influence(TRAIN, TEST)
    with pytest.raises(CheckpointError, match=r"known are torch\.optim\.Adam, AdamW and SGD"):
        ours(model, torch.optim.RMSprop(model.parameters()).state_dict()).influence(TRAIN, TEST)
    with pytest.raises(CheckpointError, match="no state dict of"):
        ours(model, {"lr": 1}).influence(TRAIN, TEST)
    rates = [
        {"params": list(model[0].named_parameters("0")), "lr": 0.1},
        {"params": list(model[2].named_parameters("2"))},
    ]
    with pytest.raises(CheckpointError, match="no multiple of one"):
        ours(model, SGD(rates, lr=0.2).state_dict()).influence(TRAIN, TEST)
    with pytest.raises(GradregError, match="use 'cosine' or False"):
        ours(model, None, normalize="relatif")
    with pytest.raises(GradregError, match="projection must be None"):
        ours(model, None, projection=gr.tracin.DenseProjection(4))


def test_adam_and_adamw_that_cannot_be_told_apart() -> None:
    """Before torch 2.7 the state of AdamW did not say that its decay is decoupled."""
    model = toy_model()
    state = trained(lambda p: AdamW(p, lr=0.01, weight_decay=0.1), model).state_dict()
    expected = ours(model, state).influence(TRAIN, TEST)
    old = copy.deepcopy(state)
    del old["param_groups"][0]["decoupled_weight_decay"]
    with pytest.raises(CheckpointError, match="does not say whether it is Adam or AdamW"):
        ours(model, old).influence(TRAIN, TEST)
    old["param_groups"][0]["decoupled_weight_decay"] = True
    assert_scores(ours(model, old).influence(TRAIN, TEST), expected)


def test_a_learning_rate_of_zero_changes_no_direction() -> None:
    """At the end of a linear decay the saved rate is 0; the direction does not depend on it."""
    model = toy_model()
    state = trained(lambda p: AdamW(p, lr=0.01), model).state_dict()
    expected = ours(model, state).influence(TRAIN, TEST)
    state["param_groups"][0]["lr"] = 0.0
    assert_scores(ours(model, state).influence(TRAIN, TEST), expected)


def test_tokens_of_tests_only() -> None:
    model = made(TokenModel)
    state = SGD(model.parameters(), lr=0.1).state_dict()
    score = ours(model, state, of=gr.loss(F.cross_entropy, shift=True)).influence
    whole = score(token_rows(), token_rows())
    assert_scores(score(token_rows(), token_rows(), per="token", tokens="test").sum(2), whole)
    with pytest.raises(GradregError, match="no sum over tokens"):
        score(token_rows(), token_rows(), per="token")
