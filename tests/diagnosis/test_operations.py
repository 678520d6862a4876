"""The doctor's class of every operation agrees with what was measured independently: no miss, no false alarm."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradreg as gr
from tests.diagnosis import table
from tests.diagnosis.operations import OPERATIONS, WRONG_THIRD

ROWS_OF_THE_TABLE = 245

# torch warns of what some rows do on purpose: functional attention on the CPU, old weight normalization, nested tensors
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def test_the_table_is_whole() -> None:
    assert len(OPERATIONS) == ROWS_OF_THE_TABLE


@pytest.mark.parametrize("name", OPERATIONS)
def test_class_in_two_heads_and_as_a_layer(name: str) -> None:
    """By itself, in two heads over a trainable base, and, if it is a layer, under a penalty on input gradients."""
    operation = OPERATIONS[name]
    found = table.measured_class(operation)
    report = gr.check_double_backward(*table.make_heads(operation), table.dot_product)
    problems = [table.heads_problem(operation, report)]
    if operation.kind in table.LAYERS:
        report = gr.check_double_backward(*table.make_network(operation), table.input_gradient)
        problems.append(table.network_problem(operation, report))
    assert (found in table.EXPECTED[operation.second], *problems) == (True, *[""] * len(problems)), found


# the other transformers inherit it in the same way, with many more parameters to look at
WRONG = [name for name, row in OPERATIONS.items() if WRONG_THIRD in row.tags and row.kind == "norm"]


@pytest.mark.parametrize("name", [*WRONG, "TransformerEncoderLayer(relu) train + MATH"])
def test_wrong_third_derivatives_are_found_and_named(name: str) -> None:
    model, x = table.make_heads(OPERATIONS[name])
    report = gr.check_double_backward(model, x, table.curvature_penalty)
    assert report.parameters["base.first.weight"].status == "wrong", str(report)
    assert all("Norm" in cause.kind and cause.curvature == "wrong" for cause in report.causes), str(report)
    assert all(cause.name.startswith("heads.0.op") for cause in report.causes)
    assert all("write the normalization out" in c.remedy or "eval mode" in c.remedy for c in report.causes)


@pytest.mark.parametrize("name", ["GroupNorm", "RMSNorm", "GRU", "LSTM", "Tanh", "SDPA MATH", "LocalResponseNorm"])
def test_right_third_derivatives_raise_no_alarm(name: str) -> None:
    model, x = table.make_heads(OPERATIONS[name])
    assert gr.check_double_backward(model, x, table.curvature_penalty).ok


# ---------------------------------------------------------------------------------------- functions outside of leaf modules
class Plain(nn.Module):
    """Calls a function between two layers, in a module with parameters of its own."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 8), nn.Linear(8, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (torch.relu, "relu"),
        (lambda x: nn.functional.leaky_relu(x, 0.1), "leaky_relu"),
        (lambda x: torch.where(x > 0, x, 0.2 * x), "where"),
        (lambda x: (x > 0).to(x.dtype) * x, "mul"),
        (lambda x: x.clamp(min=0), "clamp"),
        (lambda x: x.relu_(), "relu"),
        (lambda x: nn.functional.relu(x, inplace=True), "relu"),
    ],
)
def test_functions_are_named_with_their_module(function: Callable[..., torch.Tensor], kind: str) -> None:
    model = gr.SharedBase(nn.Linear(6, 4), [Plain(function) for _ in range(2)])
    report = gr.check_double_backward(model, torch.randn(5, 6), gr.regularizers.DiverseHeads())
    assert report.parameters["base.weight"].status in ("zero", "disconnected")
    found = {(cause.name, cause.kind, cause.curvature) for cause in report.causes}
    assert {("heads.0", kind, "piecewise linear"), ("heads.1", kind, "piecewise linear")} <= found


def test_the_program_prints_the_confusion_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: OPERATIONS[name] for name in ("ReLU", "GELU", "ELU", "Hardsigmoid", "Linear", "x.round()")}
    monkeypatch.setattr(table, "OPERATIONS", few)
    with warnings.catch_warnings():
        assert table.main() == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[:2] == ["table", "raises"]
    assert printed.strip().endswith("no disagreement")
