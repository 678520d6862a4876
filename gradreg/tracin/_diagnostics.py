"""What scores and gradients say about themselves: which parameters were covered, and whether one example dominates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradreg.engine import Coverage
from gradreg.errors import GradregError

__all__ = ["CoverageReport", "Dominance", "coverage_of", "dominance", "score_dominance"]

_FEWEST_TESTS = 5  # of fewer, one example may well be the strongest of all
_FEWEST_TRAINS = 8
_NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Dominance:
    """Whether one training example is the strongest, in absolute score, whatever the test.

    Attributes:
        column: The example that is the strongest of most tests.
        count: Of how many.
        tests: The number of tests.
        distinct: The number of different examples that are the strongest of some test.
        dominated: Whether `column` is the strongest of at least 90 % of at least 5 tests, among at least 8 examples.
    """

    column: int
    count: int
    tests: int
    distinct: int
    dominated: bool

    def __str__(self) -> str:
        return (
            f"The strongest example of {self.count} of {self.tests} tests is column {self.column}; "
            f"{self.distinct} different examples are the strongest of some test."
        )


def dominance(strongest: Tensor, trains: int) -> Dominance:
    """Count which example is the strongest how often.

    Args:
        strongest: The strongest column of every test, `[tests]`.
        trains: The number of training examples.
    """
    columns, counts = strongest.unique(return_counts=True)
    best = int(counts.argmax())
    count, tests = int(counts[best]), len(strongest)
    often = tests >= _FEWEST_TESTS and trains >= _FEWEST_TRAINS and count >= _NEARLY_ALL * tests
    return Dominance(int(columns[best]), count, tests, len(columns), often)


def score_dominance(scores: Tensor) -> Dominance:
    """Say whether one training example dominates a score matrix `[tests, trains]`.

    Large gradients (outliers, wrong labels) give large scores with everything; normalize="cosine" compares directions.

    Raises:
        GradregError: If it is no matrix.

    Example:
        >>> import torch
        >>> from gradreg.tracin import score_dominance
        >>> scores = torch.randn(20, 11, generator=torch.Generator().manual_seed(0))
        >>> score_dominance(scores).dominated
        False
        >>> scores[:, 3] *= 1000
        >>> print(score_dominance(scores))
        The strongest example of 20 of 20 tests is column 3; 1 different examples are the strongest of some test.
    """
    if scores.dim() != 2 or not scores.numel():
        raise GradregError(f"scores have shape {tuple(scores.shape)}; needed is [tests, trains].")
    return dominance(scores.abs().argmax(1), scores.shape[1])


@dataclass(frozen=True)
class CoverageReport:
    """Every parameter: its share, the rule by which its gradients were computed, or why it was left out.

    Attributes:
        parameters: One entry per parameter, tied ones under their first name.
        fraction: The share of numbers that take part.
    """

    parameters: tuple[Coverage, ...]

    @property
    def fraction(self) -> float:
        """The share of all parameter numbers that take part, from 0 to 1."""
        whole = sum(item.numel for item in self.parameters)
        return sum(item.numel for item in self.parameters if item.rule is not None) / whole

    @property
    def covered(self) -> int:
        """How many numbers take part."""
        return sum(item.numel for item in self.parameters if item.rule is not None)

    def __str__(self) -> str:
        whole = sum(item.numel for item in self.parameters)
        lines = [f"{self.covered} of {whole} parameters ({self.fraction:.1%})"]
        for item in self.parameters:
            lines.append(
                f"  {item.name}: {item.numel} ({item.numel / whole:.1%}), {item.rule or 'left out: ' + item.reason}"
            )
        return "\n".join(lines)


def coverage_of(model: nn.Module, selected: Sequence[str], found: Mapping[str, Coverage]) -> CoverageReport:
    """List all parameters of a model; rules are those of the last computation, where there was one.

    Args:
        model: The model.
        selected: Names of the parameters that take part.
        found: What the last computation said, by name.
    """
    entries = []
    for name, parameter in model.named_parameters():
        if name in selected:
            entry = found.get(name, Coverage(name, parameter.numel(), "exact"))
        else:
            reason = "not selected by params" if parameter.requires_grad else "frozen (requires_grad=False)"
            entry = Coverage(name, parameter.numel(), None, reason)
        entries.append(entry)
    return CoverageReport(tuple(entries))
