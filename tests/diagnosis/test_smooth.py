"""smooth_activations: what is swapped, what is kept, and what can be differentiated afterwards."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.diagnosis import ActivationSwaps
from gradreg.diagnosis._activations import ACTIVATIONS
from gradreg.diagnosis._softplus import softplus
from gradreg.errors import CompatibilityError, GradregError, GradregWarning

MAKERS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU(inplace)": lambda: nn.ReLU(inplace=True),
    "LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "PReLU": nn.PReLU,
    "PReLU(5)": lambda: nn.PReLU(5, init=0.1),
    "RReLU": lambda: nn.RReLU().eval(),
    "ReLU6": nn.ReLU6,
    "Hardtanh": lambda: nn.Hardtanh(-0.5, 2.0),
    "Hardshrink": lambda: nn.Hardshrink(0.7),
    "Softshrink": lambda: nn.Softshrink(0.7),
    "Threshold": lambda: nn.Threshold(0.3, -1.0),
    "Threshold(0,0)": lambda: nn.Threshold(0.0, 0.0),
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
}
EVERY = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
JUMPS = ("Threshold", "Hardshrink")


def smoothed(model: nn.Module, *args: Any, **options: Any) -> Any:
    return gr.smooth_activations(model, *args, **options)


def grid(n: int = 401, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-8, 8, n, dtype=dtype).unsqueeze(1).expand(n, 5).contiguous()


def two_heads(activation: Callable[[], nn.Module] = nn.ReLU, count: int = 2) -> gr.SharedBase:
    base = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return gr.SharedBase(base, [nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3)) for _ in range(count)])


# --- functions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_sharp_forms_are_the_activation(name: str) -> None:
    """For large beta, away from the bends; and everywhere within log 2 / beta per bend where it is continuous."""
    module = MAKERS[name]().double()
    with pytest.warns(GradregWarning, match="flat again"):
        sharp = smoothed(module, beta=1e4)
    assert type(sharp).__name__ == f"Smooth{type(module).__name__}"
    x = grid() + 1e-2
    torch.testing.assert_close(sharp(x.clone()), module(x.clone()), rtol=1e-9, atol=1e-9)
    if name not in JUMPS:
        default = smoothed(module)
        assert float((default(x.clone()) - module(x.clone())).detach().abs().max()) < 2 * 0.6932 / 10


@EVERY
def test_both_derivatives_are_right_and_the_second_is_there(make: Callable[[], nn.Module]) -> None:
    module = smoothed(make().double())
    x = torch.linspace(-7, 7, 40, dtype=torch.float64).view(8, 5).requires_grad_()
    parameters = list(module.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: module(x.clone()), (x, *parameters))
    assert torch.autograd.gradgradcheck(lambda x, *_: module(x.clone()), (x, *parameters))
    (g,) = torch.autograd.grad(module(x.clone()).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    assert bool(h.all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_threshold_and_no_overflow(dtype: torch.dtype) -> None:
    x = torch.tensor([-1e4, -5.0, 0.0, 4.0, 1e4], dtype=dtype, requires_grad=True)
    y = softplus(x, 10.0)
    assert y[0] == 0
    assert y[-1] == x[-1]
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    assert torch.isfinite(torch.stack([y, g, h])).all()
    assert h[3] > 0  # beta x = 40: exactly 0 in torch's softplus, whatever its threshold
    stock = F.softplus(x.detach().requires_grad_(), 10.0, 1e3)
    assert stock.dtype == dtype


def test_learned_slopes_stay_learned() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.PReLU(5), nn.Linear(5, 1))
    smooth = smoothed(model)
    assert [name for name, _ in smooth.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert torch.equal(smooth[1].weight, model[1].weight)
    smooth(torch.randn(4, 3)).sum().backward()
    assert smooth[1].weight.grad.any()
    images = torch.randn(2, 5, 3, 3)
    with pytest.warns(GradregWarning):
        sharp = smoothed(model[1], beta=1e5)
    torch.testing.assert_close(sharp(images), model[1](images), rtol=1e-4, atol=1e-4)


def test_random_slopes_stay_random_in_training() -> None:
    module = nn.RReLU()
    smooth = smoothed(module)
    x = torch.full((1000, 1), -5.0)
    assert smooth.training
    assert float((smooth(x) / x).std()) > 0.01
    smooth.eval()
    assert float((smooth(x) / x).std()) < 1e-6


# --- what is swapped --------------------------------------------------------------------------------------------------------


def test_the_base_hears_of_the_penalty() -> None:
    model = two_heads()
    smooth = smoothed(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gr.regularizers.DiverseHeads()(smooth, torch.randn(7, 6)).backward()
    assert all(p.grad.any() for name, p in smooth.named_parameters() if name.endswith("weight"))
    assert isinstance(smooth.swaps, ActivationSwaps)
    assert list(smooth.swaps.swapped) == ["base.1", "heads.0.1", "heads.1.1"]
    assert str(smooth.swaps).splitlines()[0] == "3 activations replaced, 0 left"
    assert type(model.heads[0][1]) is nn.ReLU
    assert not hasattr(model, "swaps")


@pytest.mark.parametrize("surrogate", [None, "second_pass"])
def test_many_heads_still_run_in_one_pass(surrogate: str | None) -> None:
    from gradreg.model._similarity import Alignment, align

    model = two_heads(count=5)
    if surrogate is None:
        assert isinstance(align(smoothed(model).heads), Alignment)
    else:
        with gr.smooth_activations(model, surrogate="second_pass"):
            assert isinstance(align(model.heads), Alignment)


class OwnForward(nn.Module):
    """Calls functions in its own forward, in three spellings, one with a setting and one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(x), 0.2)
        x = self.second(x).relu()
        x = torch.relu_(x + 0.1) - 0.05
        return self.last(F.relu(x, inplace=True))


def helper(x: Tensor) -> Tensor:
    return F.relu(x)


class Hidden(nn.Module):
    """Calls an activation in a helper function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(helper(self.first(x)))


class Kept(nn.Module):
    """Keeps functions as attributes: plain, partial, in a list, in a lambda."""

    def __init__(self) -> None:
        super().__init__()
        import functools

        self.act = F.relu
        self.intermediate_act_fn = functools.partial(F.leaky_relu, negative_slope=0.3)
        self.list = [F.relu6, torch.neg]
        self.short = lambda x: F.hardtanh(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.short(self.list[1](self.list[0](self.intermediate_act_fn(self.act(x) - 0.1))))


def second(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
    (h,) = torch.autograd.grad((g * torch.linspace(1, 2, g.numel()).view_as(g)).sum(), x, allow_unused=True)
    return torch.zeros_like(x) if h is None else h


@pytest.mark.parametrize("make", [OwnForward, Kept, lambda: nn.Sequential(OwnForward(), Kept())])
def test_functions_are_swapped_too(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(6, 4)
    smooth = smoothed(model)
    assert not second(model, x).any()
    assert second(smooth, x).any()
    assert not smooth.swaps.left
    with pytest.warns(GradregWarning):
        torch.testing.assert_close(smoothed(model, beta=1e5)(x), model(x), rtol=1e-3, atol=1e-3)
    assert type(smooth).__name__ == type(model).__name__
    assert isinstance(smooth, type(model))


def test_what_is_swapped_is_named() -> None:
    swaps = smoothed(nn.Sequential(OwnForward(), Kept())).swaps
    assert swaps.swapped["0"] == "leaky_relu, relu, relu_ in OwnForward.forward"
    assert swaps.swapped["1.act"] == "relu -> <smooth relu, beta=10>"
    assert set(swaps.swapped) == {"0", "1", "1.act", "1.intermediate_act_fn", "1.list"}


def test_helpers_are_found_by_a_run() -> None:
    model, x = Hidden(), torch.randn(6, 4)
    assert not second(smoothed(model), x).any()
    smooth = smoothed(model, batch=x)
    assert second(smooth, x).any()
    assert smooth.swaps.swapped == {"(the model)": "relu in Hidden.forward"}
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_the_activation_of_a_transformer_layer(kind: Any) -> None:
    layer = kind(4, 2, dim_feedforward=6, dropout=0.0, batch_first=True).eval()
    smooth = smoothed(layer)
    assert list(smooth.swaps.swapped) == ["activation"]
    args = (torch.randn(2, 3, 4),) * (1 if kind is nn.TransformerEncoderLayer else 2)
    with torch.no_grad():
        fused = smooth(*args)  # the inference path would take the kernel with ReLU
    torch.testing.assert_close(fused, smooth(*args))
    assert not torch.allclose(fused, layer(*args))
    assert layer.activation is F.relu


def test_a_transformer_layer_with_a_module_as_activation() -> None:
    smooth = smoothed(nn.TransformerEncoderLayer(4, 2, 6, 0.0, nn.ReLU(), batch_first=True).eval())
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        torch.testing.assert_close(smooth(x), smooth.train()(x))


def test_what_cannot_be_swapped_is_said_with_what_to_do() -> None:
    model = nn.Sequential(nn.RNN(3, 4, nonlinearity="relu"), nn.ReLU())
    with pytest.warns(GradregWarning, match=r'0: its ReLU lies inside the kernel; build it with nonlinearity="tanh"'):
        smooth = smoothed(model)
    assert list(smooth.swaps.left) == ["0"]
    assert list(smooth.swaps.swapped) == ["1"]


def test_smooth_models_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Softplus(), nn.ELU(), nn.SELU(), nn.Tanh(), nn.LayerNorm(3))
    smooth = smoothed(model)
    assert not smooth.swaps.swapped
    assert [type(m) for m in smooth] == [type(m) for m in model]


class Louder(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_subclass_with_a_forward_of_its_own_keeps_it() -> None:
    with pytest.warns(GradregWarning):
        smooth = smoothed(nn.Sequential(Louder()), beta=1e4, batch=torch.ones(2, 1))
    assert float(smooth(torch.tensor([[3.0]]))) == pytest.approx(6.0)
    assert second(smoothed(nn.Sequential(Louder()), batch=torch.ones(2, 1)), torch.ones(2, 1) / 10).any()


# --- what is kept -----------------------------------------------------------------------------------------------------------


def test_everything_else_is_kept() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.BatchNorm1d(3), nn.Linear(3, 3), shared).double()
    model[3].weight = model[0].weight
    model[2].eval()
    model[0].bias.requires_grad_(False)
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    smooth = smoothed(model)
    assert smooth[1] is smooth[4]
    assert smooth[3].weight is smooth[0].weight
    assert smooth[0].weight is not model[0].weight
    assert not smooth[2].training
    assert not smooth[0].bias.requires_grad
    assert smooth[0].weight.dtype == torch.float64
    assert smooth.state_dict().keys() == model.state_dict().keys()
    smooth(torch.randn(4, 3).double())
    assert len(seen) == 2
    with torch.no_grad():
        smooth[0].weight.zero_()
    assert model[0].weight.any()


def test_in_place_stays_in_place() -> None:
    x = torch.tensor([-1.0, 2.0])
    smooth = smoothed(nn.ReLU(inplace=True))
    assert smooth(x) is x
    assert 0 < float(x[0]) < 1e-4


def test_copies_can_be_copied_and_saved() -> None:
    smooth = smoothed(nn.Sequential(OwnForward(), nn.PReLU(), nn.TransformerEncoderLayer(3, 1, 4, 0.0).eval()))
    x = torch.randn(6, 4)
    file = io.BytesIO()
    torch.save(smooth, file)
    file.seek(0)
    for other in (copy.deepcopy(smooth), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), smooth(x))
        assert str(other) == str(smooth)


def test_an_old_weight_norm_that_was_run() -> None:
    with pytest.warns(FutureWarning):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.ReLU())
    model(torch.randn(2, 3))
    assert list(smoothed(model).swaps.swapped) == ["1"]


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].cache = model(torch.zeros(1, 3))
    with pytest.raises(CompatibilityError, match=r"0\.cache is a tensor with a graph"):
        smoothed(model)
    with pytest.raises(CompatibilityError, match="wrapped in DataParallel"):
        smoothed(nn.DataParallel(nn.Sequential(nn.ReLU())))


# --- mapping ----------------------------------------------------------------------------------------------------------------


def test_other_choices() -> None:
    model = nn.Sequential(nn.ReLU(), nn.LeakyReLU(0.3), nn.ReLU6(), nn.Hardtanh(), nn.GELU(), OwnForward())
    model.eval()
    smooth = smoothed(
        model,
        {nn.ReLU: nn.SiLU, nn.LeakyReLU: lambda old: nn.ELU(old.negative_slope), nn.ReLU6: None, nn.GELU: nn.Mish()},
    )
    kinds = [type(module).__name__ for module in smooth]
    assert kinds == ["SiLU", "ELU", "ReLU6", "SmoothHardtanh", "Mish", "OwnForward"]
    assert smooth[1].alpha == 0.3
    assert not smooth[0].training
    assert "5" not in smooth.swaps.swapped  # what replaces a module does not speak for functions
    assert type(smoothed(nn.ReLU(), {nn.ReLU: nn.SiLU})) is nn.SiLU
    with_function = smoothed(OwnForward(), {F.relu: F.silu, Tensor.relu: None})
    assert with_function.swaps.swapped == {"(the model)": "leaky_relu, relu, relu_ in OwnForward.forward"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0}, "positive number"),
        ({"beta": float("nan")}, "positive number"),
        ({"surrogate": "first"}, 'allowed are None and "second_pass"'),
        ({"mapping": {"relu": nn.GELU}}, "has the key 'relu'"),
        ({"mapping": {nn.ReLU: 3}}, "give a module class"),
        ({"mapping": {nn.ReLU: lambda old: 3}}, "made a int, not a module"),
        ({"mapping": {F.relu: 3}}, "give a function"),
        ({"mapping": {nn.ReLU: nn.GELU}, "surrogate": "second_pass"}, "may only leave some out"),
    ],
)
def test_arguments_that_do_not_fit(options: Any, words: str) -> None:
    with pytest.raises(GradregError, match=words):
        gr.smooth_activations(nn.Sequential(nn.ReLU()), **options)


@pytest.mark.parametrize(("beta", "words"), [(0.5, "nearly linear"), (50, "flat again")])
def test_a_beta_that_does_not_help_is_said(beta: float, words: str) -> None:
    with pytest.warns(GradregWarning, match=words):
        smoothed(nn.ReLU(), beta=beta)


def test_the_table_covers_the_functions_of_its_modules() -> None:
    """A call of every function is intercepted, whatever object torch hands over."""
    x = torch.linspace(-4, 4, 12).view(3, 4)
    calls: list[Callable[[Tensor], Tensor]] = [
        F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, lambda x: F.relu(input=x, inplace=True),
        F.leaky_relu, F.leaky_relu_, lambda x: F.prelu(x, torch.tensor([0.3])), lambda x: x.prelu(torch.tensor([0.3])),
        F.rrelu, torch.rrelu, F.relu6, F.hardtanh, F.hardtanh_, lambda x: F.hardtanh(x, max_val=3.0), F.hardshrink,
        Tensor.hardshrink, F.softshrink, lambda x: F.threshold(x, 1.0, 1.0), lambda x: torch.threshold(x, 1.0, 1.0),
        F.hardsigmoid, F.hardswish,
    ]  # fmt: skip

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.function(x)

    for function in calls:
        model = Calls()
        model.function = lambda x, function=function: function(x)
        smooth = smoothed(model, batch=x)
        assert smooth.swaps.swapped, function
        difference = float((smooth(x.clone()) - model(x.clone())).abs().max())
        assert 1e-7 < difference < 0.2, function
    assert len(calls) > len(ACTIVATIONS)
    assert x[0, 0] == -4  # in-place functions worked on copies
