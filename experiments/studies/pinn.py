"""Physics-informed networks for the 1-D Poisson and heat equations, against their analytic solutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import Derivatives
from gradreg.experiments.reproducible import seed_everything
from gradreg.experiments.studies._study import BASELINE, METHOD, Outcome, Scores, Study, mlp

__all__ = ["PINN"]

DATA, PHYSICS = "known values alone", "with DerivativeResidual"
_TIMES = (0.0, 0.5, 1.0)  # at which the figure shows the heat equation


@dataclass(frozen=True)
class Equation:
    """A differential equation on -1 <= x <= 1, and for the heat equation 0 <= t <= 1, with its solution.

    Args:
        exact: From coordinates `[n, d]` to the solution `[n, 1]`.
        residual: What vanishes for the solution.
        interior: Points where the equation shall hold.
        known: Points where the solution is given: boundary and initial values.
        grid: Points at which the error is measured.
        lines: Points that the figure shows, `[lines, points, d]`.
    """

    exact: Callable[[Tensor], Tensor]
    residual: Callable[[Derivatives], Tensor]
    interior: Tensor
    known: Tensor
    grid: Tensor
    lines: Tensor


@dataclass(frozen=True)
class PINN(Study):
    """Two equations with known solutions, learnt from boundary and initial values and from the equation.

    Poisson: -u'' = pi^2 sin(pi x), u(-1) = -1/2, u(1) = 1/2; solution sin(pi x) + x / 2. Heat: u_t = k u_xx,
    u(x, 0) = sin(pi x), u(-1, t) = u(1, t) = 0; solution exp(-k pi^2 t) sin(pi x). A perceptron with tanh in float64, trained
    by L-BFGS as in the paper. The baseline is the same network trained on the known values only.

    Args:
        weight: Weight of the mean squared residual; that of the mean squared error at known points is 1.
        diffusivity: k of the heat equation.
        interior_points: Random points at which the residual is taken.
        known_points: Initial and boundary points of the heat equation; the Poisson equation has two.
        iterations: Of L-BFGS, at most.
        width: Hidden units per layer.
        layers: Hidden layers.
    """

    columns: ClassVar[str] = (
        "Relative L2 error on a grid, and root mean square of the equation's residual there. The default weight is the one with "
        "the smallest residual on the grid, for which no solution is needed."
    )
    claim: ClassVar[str] = (
        "Raissi, Perdikaris, Karniadakis 2017 (arXiv 1711.10561): the equation's residual as a penalty lets a network solve it "
        "from a few boundary and initial values, with relative L2 errors of 1e-3 or so."
    )
    criterion: ClassVar[str] = "both relative errors are below 1e-2, and above 1e-1 without the residual"
    metric: ClassVar[tuple[str, str]] = (f"heat, {PHYSICS}", "error")
    number: ClassVar[str] = ".1e"

    weight: float = 1.0
    diffusivity: float = 0.1
    interior_points: int = 300
    known_points: int = 120
    iterations: int = 400
    width: int = 24
    layers: int = 2

    def run(self, seed: int) -> Outcome:
        """Solve both equations, with and without the residual."""
        scores: Scores = {}
        details: dict[str, Any] = {}
        for name, equation in self._equations(seed).items():
            residual = gr.regularizers.DerivativeResidual(equation.residual, self.weight)
            details[name] = {
                "x": equation.lines[..., 0].tolist(),
                "exact": equation.exact(equation.lines.flatten(0, 1)).tolist(),
            }
            for arm in (DATA, PHYSICS):
                seed_everything(seed)
                model = mlp(equation.grid.shape[1], self.width, 1, nn.Tanh, self.layers).double()
                self._solve(model, equation, gr.Objective(None, **({"equation": residual} if arm == PHYSICS else {})))
                scores[f"{name}, {arm}"] = _errors(model, equation, residual)
                with torch.no_grad():
                    details[name][arm] = model(equation.lines.flatten(0, 1)).tolist()
        return Outcome(scores, details)

    def _solve(self, model: nn.Module, equation: Equation, objective: gr.Objective) -> None:
        values, interior = equation.exact(equation.known), gr.Batch(equation.interior)
        optimizer = torch.optim.LBFGS(
            model.parameters(),
            max_iter=self.iterations,
            history_size=50,
            tolerance_grad=1e-9,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(equation.known), values)
            if objective.regularizers:
                loss = loss + objective(model, interior)[0]
            loss.backward()
            return loss

        optimizer.step(closure)

    def _equations(self, seed: int) -> dict[str, Equation]:
        random, k = torch.Generator().manual_seed(seed), self.diffusivity

        def uniform(count: int, low: float = 0.0) -> Tensor:
            return low + (1 - low) * torch.rand(count, generator=random, dtype=torch.float64)

        def line(low: float, points: int) -> Tensor:
            return torch.linspace(low, 1, points, dtype=torch.float64)

        x = line(-1, 201)
        ends, initial = self.known_points // 2, self.known_points - self.known_points // 2
        side = torch.where(torch.arange(ends) % 2 == 0, -1.0, 1.0).double()
        known = torch.cat(
            [torch.stack([side, uniform(ends)], 1), torch.stack([uniform(initial, -1), torch.zeros(initial)], 1)]
        )
        return {
            "Poisson": Equation(
                exact=lambda x: torch.sin(math.pi * x) + x / 2,
                residual=lambda d: -d.laplacian - math.pi**2 * torch.sin(math.pi * d.x[:, 0]),
                interior=uniform(self.interior_points, -1).unsqueeze(1),
                known=torch.tensor([[-1.0], [1.0]], dtype=torch.float64),
                grid=x.unsqueeze(1),
                lines=x.view(1, -1, 1),
            ),
            "heat": Equation(
                exact=lambda p: torch.exp(-k * math.pi**2 * p[:, 1:]) * torch.sin(math.pi * p[:, :1]),
                residual=lambda d: d.derivative(1) - k * d.derivative(0, 0),
                interior=torch.stack([uniform(self.interior_points, -1), uniform(self.interior_points)], 1),
                known=known,
                grid=torch.cartesian_prod(line(-1, 61), line(0, 31)),
                lines=torch.stack([torch.stack([x, torch.full_like(x, time)], 1) for time in _TIMES]),
            ),
        }

    def reproduced(self, scores: Scores) -> bool:
        """Tell whether the residual makes the difference for both equations."""
        own = [scores[f"{name}, {PHYSICS}"]["error"] for name in ("Poisson", "heat")]
        without = [scores[f"{name}, {DATA}"]["error"] for name in ("Poisson", "heat")]
        return max(own) < 1e-2 and min(without) > 1e-1

    def draw(self, results: Mapping[str, Any]) -> Figure:
        """Draw the solutions of the first seed beside the analytic ones."""
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        details = results["details"][str(results["seeds"][0])]
        titles = {
            "Poisson": "Poisson equation",
            "heat": f"heat equation, t = {', '.join(f'{time:g}' for time in _TIMES)}",
        }
        for axes, (name, found) in zip(figure.subplots(1, 2), details.items(), strict=True):
            x = found["x"]
            for arm, style in (
                ("exact", ("#222222", "-", 3)),
                (DATA, (BASELINE, "-", 1.6)),
                (PHYSICS, (METHOD, "--", 1.8)),
            ):
                values = torch.tensor(found[arm]).view(len(x), -1)
                color, dash, width = style
                for number, (across, height) in enumerate(zip(x, values, strict=True)):
                    label = {"exact": "analytic solution"}.get(arm, arm) if number == 0 else None
                    axes.plot(across, height, dash, color=color, linewidth=width, label=label)
            axes.set_title(titles[name], fontsize=10)
            axes.set(xlabel="x", ylabel="u", ylim=(-2, 2), xticks=(-1, 0, 1))
            axes.spines[["top", "right"]].set_visible(False)
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
        return figure


def _errors(model: nn.Module, equation: Equation, residual: gr.regularizers.DerivativeResidual) -> dict[str, float]:
    exact = equation.exact(equation.grid)
    with torch.no_grad():
        error = (model(equation.grid) - exact).norm() / exact.norm()
        left = residual(model, gr.Batch(equation.grid)).sqrt()
    return {"error": float(error), "residual": float(left)}
