"""WGAN-GP on a ring of Gaussians: a critic kept near gradient norm 1, beside one whose weights are clipped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.reproducible import seed_everything
from gradreg.experiments.studies._study import BASELINE, METHOD, Outcome, Scores, Study, mlp

__all__ = ["WGANGPMixture"]

CLIPPING, PENALTY = "weight clipping", "WGAN-GP"
_SHOWN = 600  # points of the figure
_NOISE = 2  # dimensions of the generator's input


@dataclass(frozen=True)
class WGANGPMixture(Study):
    """Wasserstein GAN on a mixture of Gaussians in the plane, on a circle of radius 1.

    Generator and critic are perceptrons with ReLU. A sample counts as good within four standard deviations of a mode, and
    a mode as covered if good samples near it are a quarter or more of its share.

    Args:
        weight: Weight of the gradient penalty.
        clip: Bound of the critic's weights in the baseline.
        modes: Gaussians on the circle.
        spread: Their standard deviation.
        steps: Steps of the generator.
        critic_steps: Steps of the critic for each.
        batch_size: Examples per step.
        width: Hidden units per layer of both networks.
        layers: Hidden layers of both.
        learning_rate: Of Adam, with betas 0.5 and 0.9.
        samples: Generated for the evaluation.
    """

    columns: ClassVar[str] = (
        "Norm of the critic's gradient at random points between data and samples: mean and standard deviation over points; modes "
        "covered; share of good samples. Default rate and clipping bound were chosen on seed 100, by modes and good samples."
    )
    claim: ClassVar[str] = (
        "Gulrajani et al. 2017 (arXiv 1704.00028, sections 3 and 4): the best critic has gradient norm 1 between data and "
        "samples. Clipped weights give gradients far from that and a poor generator; the penalty gives both."
    )
    criterion: ClassVar[str] = (
        "with the penalty the mean gradient norm is within 0.2 of 1 and all modes are covered; with clipping the norm is further "
        "off, or modes are missed"
    )
    metric: ClassVar[tuple[str, str]] = (PENALTY, "gradient norm")

    weight: float = 1.0
    clip: float = 0.3
    modes: int = 8
    spread: float = 0.05
    steps: int = 500
    critic_steps: int = 2
    batch_size: int = 128
    width: int = 64
    layers: int = 3
    learning_rate: float = 0.002
    samples: int = 4000

    def run(self, seed: int) -> Outcome:
        """Train both pairs of networks on the same draws."""
        scores: Scores = {}
        points: dict[str, Any] = {}
        for arm in (CLIPPING, PENALTY):
            seed_everything(seed)
            generator = mlp(_NOISE, self.width, 2, nn.ReLU, self.layers)
            critic = mlp(2, self.width, 1, nn.ReLU, self.layers)
            self._play(generator, critic, seed, arm == PENALTY)
            random = torch.Generator().manual_seed(1_000_003 + seed)
            with torch.no_grad():
                drawn = generator(torch.randn(self.samples, _NOISE, generator=random))
            real = self._real(self.samples, random)
            scores[arm] = {**self._gradient_norms(critic, real, drawn, random), **self._coverage(drawn)}
            points[arm] = drawn[:_SHOWN].tolist()
        return Outcome(scores, {"data": real[:_SHOWN].tolist(), **points})

    def _play(self, generator: nn.Module, critic: nn.Module, seed: int, penalized: bool) -> None:
        random = torch.Generator().manual_seed(seed)
        objective = gr.Objective(None, penalty=gr.regularizers.WGANGP(self.weight))  # the critic's loss has no targets
        of_critic, of_generator = (
            torch.optim.Adam(network.parameters(), lr=self.learning_rate, betas=(0.5, 0.9))
            for network in (critic, generator)
        )
        for _ in range(self.steps):
            for _ in range(self.critic_steps):
                real = self._real(self.batch_size, random)
                with torch.no_grad():
                    fake = generator(torch.randn(self.batch_size, _NOISE, generator=random))
                of_critic.zero_grad()
                loss = critic(fake).mean() - critic(real).mean()
                if penalized:
                    loss = loss + objective(critic, gr.Batch(real, extras={"fake": fake}))[0]
                loss.backward()
                of_critic.step()
                if not penalized:
                    with torch.no_grad():
                        for weight in critic.parameters():
                            weight.clamp_(-self.clip, self.clip)
            of_generator.zero_grad()
            (-critic(generator(torch.randn(self.batch_size, _NOISE, generator=random))).mean()).backward()
            of_generator.step()

    def _centers(self) -> Tensor:
        angles = 2 * math.pi * torch.arange(self.modes) / self.modes
        return torch.stack([angles.cos(), angles.sin()], 1)

    def _real(self, count: int, random: torch.Generator) -> Tensor:
        chosen = torch.randint(self.modes, (count,), generator=random)
        return self._centers()[chosen] + self.spread * torch.randn(count, 2, generator=random)

    def _gradient_norms(
        self, critic: nn.Module, real: Tensor, fake: Tensor, random: torch.Generator
    ) -> dict[str, float]:
        between = torch.lerp(real, fake, torch.rand(len(real), 1, generator=random))
        norms = gr.gradients(critic, gr.Batch(between), of=gr.scalars.total(), wrt=gr.Inputs())["inputs"].norm(dim=1)
        return {"gradient norm": float(norms.mean()), "its spread": float(norms.std())}

    def _coverage(self, drawn: Tensor) -> dict[str, float]:
        distance, nearest = torch.cdist(drawn, self._centers()).min(1)
        good = distance < 4 * self.spread
        counts = torch.bincount(nearest[good], minlength=self.modes)
        return {
            "modes covered": float((counts >= len(drawn) / self.modes / 4).sum()),
            "good samples": float(good.double().mean()),
        }

    def reproduced(self, scores: Scores) -> bool:
        """Tell whether the penalty does what it is for."""
        distance = {arm: abs(scores[arm]["gradient norm"] - 1) for arm in scores}
        covered = scores[PENALTY]["modes covered"] == self.modes
        worse = distance[CLIPPING] > distance[PENALTY] or scores[CLIPPING]["modes covered"] < self.modes
        return covered and distance[PENALTY] < 0.2 and worse

    def draw(self, results: Mapping[str, Any]) -> Figure:
        """Show samples of the first seed beside data, and the gradient norms of all seeds."""
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        *planes, axes = figure.subplots(1, 3)
        found = results["details"][str(results["seeds"][0])]
        data = np.array(found["data"])
        for plane, (arm, color) in zip(planes, ((CLIPPING, BASELINE), (PENALTY, METHOD)), strict=True):
            points = np.array(found[arm])
            plane.plot(*data.T, ".", color="#222222", markersize=3, alpha=0.25, label="data")
            plane.plot(*points.T, ".", color=color, markersize=3, label=arm)
            plane.set(aspect="equal", xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), xticks=[], yticks=[])
            plane.set_title(arm, fontsize=10)
        for number, (arm, color) in enumerate(((CLIPPING, BASELINE), (PENALTY, METHOD))):
            means, spreads = (np.array(results["scores"][arm][column]) for column in ("gradient norm", "its spread"))
            places = number + np.linspace(-0.25, 0.25, len(means)) * (len(means) > 1)
            axes.errorbar(places, means, spreads, fmt="o", color=color, markersize=4, linewidth=1.6)
        axes.axhline(1, color="#222222", linestyle=":", linewidth=1)
        axes.set(xticks=(0, 1), xlim=(-0.6, 1.6), ylabel="norm of the critic's gradient")
        axes.set_xticklabels([CLIPPING, PENALTY])
        axes.set_yscale("log", nonpositive="clip")
        axes.set_title("every seed: mean and spread over points", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        return figure
