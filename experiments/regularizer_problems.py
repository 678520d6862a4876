"""For every regularizer: what it is tried on to say with which layers it works. Small models, all random numbers fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import gradreg as gr

__all__ = ["PROBLEMS", "Problem", "batch_of", "model_of", "verdict"]

R = gr.regularizers
ROWS, SIZE, CODE, CLASSES, SAMPLES, WIDTH = 8, 6, 5, 3, 4, 12


@dataclass(frozen=True)
class Problem:
    """One regularizer and what it is tried on.

    Attributes:
        make: Makes it.
        model: `"classifier"`, `"critic"`, `"encoder"`, `"coordinates"`, `"heads"` or `"ensemble"`.
        extras: Makes the batch's extras, so that nothing is drawn.
        wrt: With respect to what, in words, where the regularizer has no attribute that says so.
        test: `"doctor"`; `"data"`: the doctor, with the inputs as the parameters that are trained; `"formula"`: against the
            documented gradient, for a value whose gradient is not its derivative.
    """

    make: Callable[[], gr.Regularizer]
    model: str = "classifier"
    extras: Callable[[], dict[str, Tensor]] = dict
    wrt: str = ""
    test: str = "doctor"


def _like_inputs(*between: int) -> Tensor:
    return torch.randn(ROWS, *between, SIZE)


def _fake() -> dict[str, Tensor]:
    return {"fake": _like_inputs(), "alpha": torch.rand(ROWS)}


PROBLEMS: dict[str, Problem] = {
    "InputGradient": Problem(R.InputGradient),
    "RightForRightReasons": Problem(R.RightForRightReasons, extras=lambda: {"mask": (_like_inputs() > 0).double()}),
    "JacobianNorm": Problem(R.JacobianNorm),
    "ContractivePenalty": Problem(R.ContractivePenalty, "encoder"),
    "GradientSupervision": Problem(R.GradientSupervision, extras=lambda: {"counterfactual": _like_inputs()}),
    "Sobolev": Problem(R.Sobolev, extras=lambda: {"derivatives": _like_inputs(CLASSES)}),
    "AttributionPrior": Problem(
        lambda: R.AttributionPrior(samples=SAMPLES),
        extras=lambda: {"references": _like_inputs(SAMPLES), "alpha": torch.rand(ROWS, SAMPLES)},
    ),
    "LocalLinearity": Problem(
        lambda: R.LocalLinearity(radius=0.2), extras=lambda: {"start": 0.1 * torch.rand(ROWS, SIZE)}
    ),
    "CURE": Problem(R.CURE),
    "HessianPenalty": Problem(
        lambda: R.HessianPenalty(directions=SAMPLES), extras=lambda: {"directions": _like_inputs(SAMPLES).sign()}
    ),
    "WGANGP": Problem(R.WGANGP, "critic", _fake),
    "DRAGAN": Problem(R.DRAGAN, "critic", lambda: {"noise": _like_inputs()}),
    "R1": Problem(R.R1, "critic"),
    "R2": Problem(R.R2, "critic", _fake),
    "PathLength": Problem(R.PathLength, "encoder", lambda: {"projections": torch.randn(ROWS, CODE)}),
    "DerivativeResidual": Problem(lambda: R.DerivativeResidual(lambda d: d.laplacian + 1), "coordinates"),
    "DiverseHeads": Problem(R.DiverseHeads, "heads"),
    "LocalIndependence": Problem(R.LocalIndependence, "ensemble"),
    "GradientAlignmentLoss": Problem(R.GradientAlignmentLoss, "ensemble"),
    "TRS": Problem(R.TRS, "ensemble"),
    "IRMv1": Problem(R.IRMv1, wrt="a scale of the outputs"),
    "IGA": Problem(R.IGA),
    "Fish": Problem(R.Fish),
    "Fishr": Problem(R.Fishr, wrt="the last linear layer"),
    "GradientNorm": Problem(R.GradientNorm),
    "FiniteDifferenceGradientNorm": Problem(R.FiniteDifferenceGradientNorm, test="formula"),
    "GradientMatching": Problem(lambda: R.GradientMatching(real=_data(1)), test="data"),
}


def _data(seed: int, inputs: int = SIZE, **extras: Tensor) -> gr.Batch:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ROWS, inputs, generator=generator, dtype=torch.float64)
    targets, groups = torch.arange(ROWS) % CLASSES, torch.arange(ROWS) % 2
    return gr.Batch(values, targets, groups=groups, extras={key: value.double() for key, value in extras.items()})


def batch_of(problem: Problem) -> gr.Batch:
    """Return the batch of a problem, always the same, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _data(0, 2 if problem.model == "coordinates" else SIZE, **problem.extras())


def model_of(problem: Problem, activation: type[nn.Module], norm: bool = False) -> nn.Module:
    """Return the model of a problem: two hidden layers, each perhaps normalized, with this activation; always the same."""

    def network(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before in (inputs, WIDTH):
            layers += [nn.Linear(before, WIDTH), *([nn.LayerNorm(WIDTH)] if norm else []), activation()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if problem.model == "heads":
            base = nn.Sequential(network(SIZE, WIDTH), activation())
            return gr.SharedBase(base, [network(WIDTH, CLASSES) for _ in range(3)]).double()
        if problem.model == "ensemble":
            return gr.Ensemble([network(SIZE, CLASSES) for _ in range(3)]).double()
        sizes = {"classifier": (SIZE, CLASSES), "critic": (SIZE, 1), "encoder": (SIZE, CODE), "coordinates": (2, 1)}
        return network(*sizes[problem.model]).double()


def verdict(problem: Problem, activation: type[nn.Module], norm: bool = False) -> str:
    """Say whether everything that is trained hears of the penalty, rightly: "yes", or who does not."""
    model, batch, penalty = model_of(problem, activation, norm), batch_of(problem), problem.make()
    if problem.test == "formula":
        return _by_formula(model, batch, penalty)
    if problem.test == "data":
        report = gr.check_double_backward(
            _Trained(batch), batch, lambda images, given: penalty(model, images.batch(given))
        )
    else:
        report = gr.check_double_backward(model, batch, penalty)
    if report.ok:
        return "yes"
    blocked = report.blocked()
    statuses = {report.parameters[name].status for name in blocked}
    if "wrong" in statuses:
        return "no: wrong"
    if "unsupported" in statuses:
        return "no: raises"
    if len(blocked) == len(report.parameters):
        return "no: nothing hears of it"
    parts = sorted({name.partition(".")[0] for name in blocked})
    return f"not the {' and the '.join(parts)}"


class _Trained(nn.Module):
    """A batch whose inputs are parameters."""

    def __init__(self, batch: gr.Batch) -> None:
        super().__init__()
        assert isinstance(batch.inputs, Tensor)
        self.inputs = nn.Parameter(batch.inputs.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inputs + 0 * inputs

    def batch(self, given: gr.Batch) -> gr.Batch:
        return gr.Batch(self(given.inputs), given.targets)


def _by_formula(model: nn.Module, batch: gr.Batch, penalty: gr.Regularizer) -> str:
    """Compare with the difference quotient of the loss gradients, which `FiniteDifferenceGradientNorm` documents."""
    assert isinstance(penalty, R.FiniteDifferenceGradientNorm)
    named = dict(model.named_parameters())

    def gradient(at: dict[str, Tensor]) -> tuple[Tensor, ...]:
        risk = F.cross_entropy(functional_call(model, at, (batch.inputs,)), batch.targets)
        return torch.autograd.grad(risk, list(at.values()))

    here = gradient(named)
    length = torch.stack([g.square().sum() for g in here]).sum().sqrt()
    moved = {
        name: (p + penalty.radius / length * g).detach().requires_grad_()
        for (name, p), g in zip(named.items(), here, strict=True)
    }
    wanted = [(there - g) / penalty.radius for there, g in zip(gradient(moved), here, strict=True)]
    found = torch.autograd.grad(penalty(model, batch), list(named.values()))
    same = all(torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(found, wanted, strict=True))
    return "yes" if same and any(bool(g.any()) for g in found) else "no: wrong"
