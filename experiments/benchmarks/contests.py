"""For every regularizer: a model, a batch, and its training step as it is usually written by hand.

The hand-written steps are what papers' repositories do: one `torch.autograd.grad` per head, environment, output, projection or
sample in a Python loop, on one shared forward where that is possible. They compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import gradreg as gr

R = gr.regularizers
BATCH, SIZES, CLASSES, HEADS, ENVIRONMENTS, PROJECTIONS = 256, (1024, 512, 256), 10, 8, 4, 4
WEIGHT = 0.1


@dataclass
class Contest:
    """One regularizer with what it runs on.

    Attributes:
        penalty: The regularizer.
        model: The model.
        batch: The batch.
        by_hand: The penalty by hand: from the batch's inputs, which require grad, and the outputs of their one forward.
        task: The task, which keeps its own reduction.
        several: Whether it goes over several heads, environments, outputs, projections or samples.
    """

    penalty: gr.Regularizer
    model: nn.Module
    batch: gr.Batch
    by_hand: Callable[[Tensor, Tensor], Tensor]
    task: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    several: bool = False
    input_grad: bool = True


def mlp(*sizes: int, activation: type[nn.Module] = nn.Softplus) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def classifier() -> nn.Sequential:
    return mlp(*SIZES, CLASSES)


def critic() -> nn.Sequential:
    return mlp(*SIZES, 1)


def shared() -> gr.SharedBase:
    base = nn.Sequential(*mlp(*SIZES), nn.Softplus())
    return gr.SharedBase(base, [mlp(SIZES[-1], 64, CLASSES) for _ in range(HEADS)])


def ensemble() -> gr.Ensemble:
    return gr.Ensemble([mlp(SIZES[0], 256, CLASSES) for _ in range(HEADS)])


def data(**extras: Tensor) -> gr.Batch:
    groups = torch.arange(BATCH) % ENVIRONMENTS
    return gr.Batch(torch.randn(BATCH, SIZES[0]), torch.randint(CLASSES, (BATCH,)), groups=groups, extras=extras)


def like_inputs(*between: int) -> Tensor:
    return torch.randn(BATCH, *between, SIZES[0])


def of_inputs(value: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(value, x, create_graph=True)[0]


def wasserstein(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


# heads


def of_pairs(kind: str, gradients: list[Tensor]) -> Tensor:
    cosines = [F.cosine_similarity(a, b, dim=1) for a, b in combinations(gradients, 2)]
    if kind == "coherence":
        return sum(c.exp() for c in cosines).log().mean()
    if kind == "smooth":
        squares = sum(g.square().sum(1).mean() for g in gradients) / len(gradients)
        return sum(c.abs().mean() for c in cosines) / len(cosines) + 2 * squares
    total = sum(c.square().mean() for c in cosines)
    return total / len(cosines) if kind == "mean" else total


def heads_at_features() -> Contest:
    model, batch = shared(), data()

    def by_hand(x: Tensor, features: Tensor) -> Tensor:
        gradients = []
        for head in model.heads:
            logits = head(features)
            top = logits.gather(1, logits.argmax(1, keepdim=True)).squeeze(1) - logits.mean(1)
            gradients.append(of_inputs(top.sum(), features))
        return of_pairs("mean", gradients)

    return Contest(R.DiverseHeads(), model, batch, by_hand, several=True, input_grad=False)


def models_at_inputs(make: type[gr.Regularizer], kind: str) -> Callable[[], Contest]:
    def contest() -> Contest:
        model, batch = ensemble(), data()

        def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
            losses = [F.cross_entropy(own, batch.targets, reduction="sum") for own in outputs.unbind(1)]
            return of_pairs(kind, [of_inputs(value, x) for value in losses])

        return Contest(make(), model, batch, by_hand, several=True)

    return contest


# environments and parameters


def environment_losses(outputs: Tensor, batch: gr.Batch) -> list[Tensor]:
    masks = [batch.groups == e for e in range(ENVIRONMENTS)]
    return [F.cross_entropy(outputs[mask], batch.targets[mask]) for mask in masks]


def irm() -> Contest:
    model, batch = classifier(), data()

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        total = 0.0
        for e in range(ENVIRONMENTS):
            mask, scale = batch.groups == e, torch.ones((), requires_grad=True)
            risk = F.cross_entropy(outputs[mask] * scale, batch.targets[mask])
            total = total + torch.autograd.grad(risk, scale, create_graph=True)[0].square()
        return total / ENVIRONMENTS

    return Contest(R.IRMv1(), model, batch, by_hand, several=True, input_grad=False)


def environment_gradients(kind: str) -> Callable[[], Contest]:
    def contest() -> Contest:
        model, batch = classifier(), data()
        parameters = list(model.parameters())

        def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
            rows = [
                torch.autograd.grad(risk, parameters, create_graph=True) for risk in environment_losses(outputs, batch)
            ]
            if kind == "variance":
                means = [torch.stack(column).mean(0) for column in zip(*rows, strict=True)]
                squares = [(g - m).square().sum() for row in rows for g, m in zip(row, means, strict=True)]
                return sum(squares) / ENVIRONMENTS
            pairs = list(combinations(rows, 2))
            return -sum((a * b).sum() for one, two in pairs for a, b in zip(one, two, strict=True)) / len(pairs)

        penalty = R.IGA() if kind == "variance" else R.Fish()
        return Contest(penalty, model, batch, by_hand, several=True, input_grad=False)

    return contest


def fishr() -> Contest:
    model, batch = classifier(), data()
    last, before = model[-1], model[:-1]

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        features = before(x)

        def loss(parameters: dict[str, Tensor], h: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(last, parameters, (h[None],)), y[None])

        single = vmap(grad(loss), (None, 0, 0))(dict(last.named_parameters()), features, batch.targets)
        flat = torch.cat([value.flatten(1) for value in single.values()], 1)
        variances = torch.stack([flat[batch.groups == e].var(0, unbiased=False) for e in range(ENVIRONMENTS)])
        return (variances - variances.mean(0)).square().sum(1).mean()

    return Contest(R.Fishr(), model, batch, by_hand, several=True, input_grad=False)


def gradient_norm() -> Contest:
    model, batch = classifier(), data()

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        found = torch.autograd.grad(
            F.cross_entropy(outputs, batch.targets), list(model.parameters()), create_graph=True
        )
        return (sum(g.square().sum() for g in found) + 1e-12).sqrt()

    return Contest(R.GradientNorm(), model, batch, by_hand, input_grad=False)


def finite_difference() -> Contest:
    model, batch, radius = classifier(), data(), 0.05

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        here, named = F.cross_entropy(outputs, batch.targets), dict(model.named_parameters())
        found = torch.autograd.grad(here, list(named.values()), retain_graph=True)
        length = torch.stack([g.square().sum() for g in found]).sum().sqrt()
        moved = {name: p + radius / length * g for (name, p), g in zip(named.items(), found, strict=True)}
        there = F.cross_entropy(functional_call(model, moved, (x,)), batch.targets)
        return (there - here) / radius

    penalty = R.FiniteDifferenceGradientNorm(radius=radius)
    return Contest(penalty, model, batch, by_hand, input_grad=False)


def gradient_matching() -> Contest:
    model = classifier()
    parameters = list(model.parameters())
    images = torch.randn(10 * CLASSES, SIZES[0], requires_grad=True)
    batch = gr.Batch(images, torch.arange(CLASSES).repeat(10))
    real = gr.Batch(torch.randn(64 * CLASSES, SIZES[0]), torch.arange(CLASSES).repeat(64))

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        total = 0.0
        for label in range(CLASSES):
            rows, others = batch.targets == label, real.targets == label
            risk = F.cross_entropy(model(images[rows]), batch.targets[rows])
            ours = torch.autograd.grad(risk, parameters, create_graph=True)
            risk = F.cross_entropy(model(real.inputs[others]), real.targets[others])
            theirs = torch.autograd.grad(risk, parameters)
            for a, b in zip(ours, theirs, strict=True):
                if a.dim() > 1:
                    total = total + (1 - F.cosine_similarity(a, b, dim=1)).sum()
        return total

    return Contest(R.GradientMatching(real=real), model, batch, by_hand, several=True, input_grad=False)


def residual() -> Contest:
    model, batch = mlp(3, 64, 64, 64, 1, activation=nn.Tanh), gr.Batch(torch.rand(1024, 3), torch.zeros(1024, 1))

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        gradient = of_inputs(outputs.sum(), x)
        laplacian = sum(of_inputs(gradient[:, a].sum(), x)[:, a] for a in range(3))
        return (laplacian + 1).square().mean()

    penalty = R.DerivativeResidual(lambda d: d.laplacian + 1)
    return Contest(penalty, model, batch, by_hand, F.mse_loss)


# inputs


def input_gradient() -> Contest:
    batch = data()

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        risk = F.cross_entropy(outputs, batch.targets, reduction="sum")
        return of_inputs(risk, x).square().sum(1).mean()

    return Contest(R.InputGradient(), classifier(), batch, by_hand)


def right_reasons() -> Contest:
    batch = data(mask=(like_inputs() > 0).float())

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        gradient = of_inputs(outputs.log_softmax(1).sum(), x)
        return (batch.extras["mask"] * gradient).square().sum(1).mean()

    return Contest(R.RightForRightReasons(), classifier(), batch, by_hand)


def jacobian() -> Contest:
    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        rows = [of_inputs(outputs[:, c].sum(), x).square().sum(1).mean() for c in range(CLASSES)]
        return sum(rows) / 2

    return Contest(R.JacobianNorm(), classifier(), data(), by_hand, several=True)


def contractive() -> Contest:
    batch = data(projections=torch.randn(BATCH, PROJECTIONS, SIZES[-1]))
    encoder = nn.Sequential(*mlp(*SIZES), nn.Sigmoid())

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        vectors = batch.extras["projections"].unbind(1)
        return sum(of_inputs((outputs * v).sum(), x).square().sum(1).mean() for v in vectors) / PROJECTIONS

    penalty = R.ContractivePenalty(projections=PROJECTIONS)
    return Contest(penalty, encoder, batch, by_hand, wasserstein, several=True)


def squared_score(make: type[gr.Regularizer]) -> Callable[[], Contest]:
    def contest() -> Contest:
        batch, model = data(fake=like_inputs()), critic()

        def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
            if make is R.R1:
                return of_inputs(outputs.sum(), x).square().sum(1).mean() / 2
            fake = batch.extras["fake"].clone().requires_grad_()
            return of_inputs(model(fake).sum(), fake).square().sum(1).mean() / 2

        return Contest(make(), model, batch, by_hand, wasserstein, input_grad=make is R.R1)

    return contest


def score_norm(make: type[gr.Regularizer]) -> Callable[[], Contest]:
    def contest() -> Contest:
        batch, model = data(fake=like_inputs(), alpha=torch.rand(BATCH), noise=like_inputs()), critic()

        def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
            extras = batch.extras
            between = extras["alpha"][:, None] * (extras["fake"] - x)
            point = (x + (between if make is R.WGANGP else 0.5 * extras["noise"])).detach().requires_grad_()
            return ((of_inputs(model(point).sum(), point).square().sum(1) + 1e-12).sqrt() - 1).square().mean()

        return Contest(make(), model, batch, by_hand, wasserstein, input_grad=False)

    return contest


def path_length() -> Contest:
    batch = data(projections=torch.randn(BATCH, SIZES[-1]))

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        gradient = of_inputs((outputs * batch.extras["projections"]).sum(), x)
        lengths = (gradient.square().sum(1) + 1e-12).sqrt()
        return (lengths - 0.01 * lengths.mean()).square().mean()  # the first step: the average starts at zero

    return Contest(R.PathLength(), mlp(*SIZES), batch, by_hand, wasserstein)


def sobolev() -> Contest:
    batch = data(derivatives=like_inputs(CLASSES))

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        given = batch.extras["derivatives"]
        rows = [(of_inputs(outputs[:, c].sum(), x) - given[:, c]).square().sum(1).mean() for c in range(CLASSES)]
        return sum(rows)

    return Contest(R.Sobolev(), classifier(), batch, by_hand, several=True)


def supervision() -> Contest:
    batch = data(counterfactual=like_inputs())

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        gradient = of_inputs(outputs.gather(1, batch.targets[:, None]).sum(), x)
        return (1 - F.cosine_similarity(gradient, (x - batch.extras["counterfactual"]).detach(), dim=1)).mean()

    return Contest(R.GradientSupervision(), classifier(), batch, by_hand)


def attribution() -> Contest:
    batch = data(references=like_inputs(PROJECTIONS), alpha=torch.rand(BATCH, PROJECTIONS))
    model = classifier()

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        total = 0.0
        for k in range(PROJECTIONS):
            difference = (x - batch.extras["references"][:, k]).detach()
            point = (
                batch.extras["references"][:, k] + batch.extras["alpha"][:, k : k + 1] * difference
            ).requires_grad_()
            top = model(point).gather(1, batch.targets[:, None])
            total = total + difference * of_inputs(top.sum(), point) / PROJECTIONS
        return (total[:, 1:] - total[:, :-1]).abs().sum(1).mean()

    return Contest(R.AttributionPrior(), model, batch, by_hand, several=True, input_grad=False)


def linearity() -> Contest:
    batch, model, radius, steps = data(start=0.01 * torch.rand(BATCH, SIZES[0])), classifier(), 8 / 255, 10

    def losses(point: Tensor) -> Tensor:
        return F.cross_entropy(model(point), batch.targets, reduction="none")

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        here = F.cross_entropy(outputs, batch.targets, reduction="none")
        gradient = of_inputs(here.sum(), x)
        delta, level, slope = batch.extras["start"], here.detach(), gradient.detach()
        for _ in range(steps):
            delta = delta.detach().requires_grad_()
            deviation = (losses(x.detach() + delta) - level - (delta * slope).sum(1)).abs()
            rise = torch.autograd.grad(deviation.sum(), delta)[0]
            delta = (delta + 2.5 * radius / steps * rise.sign()).clamp(-radius, radius)
        delta = delta.detach()
        along = (delta * gradient).sum(1)
        return ((losses(x + delta) - here - along).abs() + 0.75 * along.abs()).mean()

    return Contest(R.LocalLinearity(), model, batch, by_hand)


def curvature() -> Contest:
    batch, model = data(), classifier()

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        first = of_inputs(F.cross_entropy(outputs, batch.targets, reduction="sum"), x)
        sign = first.detach().sign()
        point = (x + 1.5 * sign / sign.norm(dim=1, keepdim=True)).detach().requires_grad_()
        moved = of_inputs(F.cross_entropy(model(point), batch.targets, reduction="sum"), point)
        return (moved - first).square().sum(1).mean()

    return Contest(R.CURE(), model, batch, by_hand)


def second_differences() -> Contest:
    batch, model = data(directions=like_inputs(PROJECTIONS).sign()), classifier()

    def by_hand(x: Tensor, outputs: Tensor) -> Tensor:
        center, columns = model(x), []
        for v in batch.extras["directions"].unbind(1):
            columns.append((model(x + 0.1 * v) - 2 * center + model(x - 0.1 * v)) / 0.1**2)
        return torch.stack(columns, -1).var(-1).amax(1).mean()

    return Contest(R.HessianPenalty(), model, batch, by_hand, several=True, input_grad=False)


CONTESTS: dict[str, Callable[[], Contest]] = {
    "DiverseHeads": heads_at_features,
    "LocalIndependence": models_at_inputs(R.LocalIndependence, "sum"),
    "GradientAlignmentLoss": models_at_inputs(R.GradientAlignmentLoss, "coherence"),
    "TRS": models_at_inputs(R.TRS, "smooth"),
    "IRMv1": irm,
    "IGA": environment_gradients("variance"),
    "Fish": environment_gradients("product"),
    "Fishr": fishr,
    "GradientNorm": gradient_norm,
    "FiniteDifferenceGradientNorm": finite_difference,
    "GradientMatching": gradient_matching,
    "DerivativeResidual": residual,
    "InputGradient": input_gradient,
    "RightForRightReasons": right_reasons,
    "JacobianNorm": jacobian,
    "ContractivePenalty": contractive,
    "WGANGP": score_norm(R.WGANGP),
    "DRAGAN": score_norm(R.DRAGAN),
    "R1": squared_score(R.R1),
    "R2": squared_score(R.R2),
    "PathLength": path_length,
    "Sobolev": sobolev,
    "GradientSupervision": supervision,
    "AttributionPrior": attribution,
    "LocalLinearity": linearity,
    "CURE": curvature,
    "HessianPenalty": second_differences,
}
