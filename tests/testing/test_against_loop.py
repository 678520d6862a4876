"""vmap against the loop: right functions pass; torch's own bugs, and ours to come, do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from gradreg.errors import GradregError
from gradreg.model._norms import written_out_norms
from gradreg.testing import check_against_loop


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_right_functions_pass() -> None:
    check_against_loop(lambda x, w: torch.tanh(x @ w), rows(4, 3), rows(3, 2), in_dims=(0, None))
    check_against_loop(lambda x: {"a": x.sin().sum(), "b": (x**3, x.exp())}, rows(3, 5), in_dims=1)
    check_against_loop(lambda both, n: both["x"] * both["y"].sum() * n, {"x": rows(3, 2), "y": rows(3, 4)}, 2.0)
    check_against_loop(lambda x, i: x[i].square(), rows(3, 4), torch.tensor([[0], [3], [1]]))
    check_against_loop(lambda x: x.sin(), rows(4, 3), out_dims=1)
    check_against_loop(lambda x: x.float().exp(), rows(4, 3), tolerance=1e-5)


def test_per_example_gradients_of_a_network() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def of_one(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, parameters, (x[None],)).sum()

    check_against_loop(grad(of_one), dict(net.named_parameters()), rows(3, 3), in_dims=(None, 0))


def test_solve_with_an_axis_that_the_right_side_lacks() -> None:
    right = rows(3, 1)
    with pytest.raises(AssertionError, match=r"in the value: shape \(4, 4, 3, 1\), expected \(4, 1, 3, 1\)"):
        check_against_loop(lambda a: torch.linalg.solve(a[None], right), rows(4, 3, 3))
    check_against_loop(lambda a: torch.linalg.solve(a[None], right[None]), rows(4, 3, 3), derivatives=1)


def test_layer_norm_in_a_gradient_that_is_differentiated_again() -> None:
    """Finite differences side with the loop."""
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()
    parameters, x = dict(net.named_parameters()), rows(3, 3)
    per_example = grad(lambda p, x: functional_call(net, p, (x,)).sum())
    with pytest.raises(AssertionError, match=r"differ in the first derivative by .*the loop gives"):
        check_against_loop(per_example, parameters, x, in_dims=(None, 0))
    check_against_loop(per_example, parameters, x, in_dims=(None, 0), derivatives=0)
    with written_out_norms(net, 5):
        check_against_loop(per_example, parameters, x, in_dims=(None, 0))


def test_tensors_that_are_no_arguments() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    check_against_loop(lambda x: net(x), rows(3, 3), parameters=net.parameters())
    with pytest.raises(AssertionError, match="in the first derivative by parameter 0"):
        check_against_loop(
            lambda x: net(x),
            rows(3, 3),
            parameters=net.parameters(),
            vmapped=lambda x: functional_call(net, {k: p.detach() for k, p in net.named_parameters()}, (x,)),
        )


def doubled(x: Tensor) -> Tensor:
    return 2 * x.sin()


@pytest.mark.parametrize(
    ("vmapped", "words"),
    [
        (lambda x: 2 * x.sin() + x.mean(0, keepdim=True) * 1e-3, "in the value"),
        (lambda x: 2 * x.sin().detach(), "in the first derivative by argument 0"),
        (lambda x: _Detaching.apply(x), "in the second derivative by argument 0"),
        (lambda x: {"y": 2 * x.sin()}, r"vmap returns \[\"\['y'\]\"\], the loop \[''\]"),
        (lambda x: (2 * x.sin()).float(), "expected torch.float64"),
        (lambda x: 2 * x.sin() * torch.tensor([1.0, 1.0, float("nan")])[:, None], "nan at"),
    ],
)
def test_batched_code_of_ones_own(vmapped: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_against_loop(doubled, rows(3, 4), vmapped=vmapped)
    check_against_loop(doubled, rows(3, 4), vmapped=doubled)


class _Detaching(torch.autograd.Function):
    """2 sin(x), right to first order only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x.sin()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * 2 * ctx.saved_tensors[0].detach().cos()


def test_randomness() -> None:
    def dropped(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)

    x = rows(3, 40)
    before = torch.get_rng_state()
    check_against_loop(dropped, x, randomness="same")
    check_against_loop(dropped, x, randomness="different")
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(RuntimeError, match="randomness"):
        check_against_loop(dropped, rows(3, 4))


def test_a_missing_derivative_is_told_from_a_wrong_one() -> None:
    hard = nn.Hardsigmoid()
    with pytest.raises(
        AssertionError, match=r"second derivative of the loop cannot be taken.*hardsigmoid.*derivatives=1"
    ):
        check_against_loop(lambda x: hard(x), rows(3, 4))
    check_against_loop(lambda x: hard(x), rows(3, 4), derivatives=1)


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((rows(3, 2), rows(4, 2)), {}, r"sizes \[3, 4\]"),
        ((rows(1, 2), rows(1, 2)), {}, "two or more"),
        ((rows(3, 2), rows(3, 2)), {"in_dims": (0,)}, "each of the 2 arguments"),
        ((rows(3, 2), rows(3, 2)), {"derivatives": 3}, "allowed are 0, 1 and 2"),
    ],
)
def test_arguments_that_do_not_fit(args: Any, options: Any, words: str) -> None:
    with pytest.raises(GradregError, match=words):
        check_against_loop(torch.add, *args, **options)
