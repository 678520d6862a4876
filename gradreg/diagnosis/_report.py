"""The report of a diagnosis, as data and as a short table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gradreg.errors import CompatibilityError

OK = "ok"
ZERO = "zero"
PARTLY_ZERO = "partly_zero"
TINY = "tiny"
DISCONNECTED = "disconnected"
UNSUPPORTED = "unsupported"
WRONG = "wrong"
EXPECTED_ZERO = "expected zero"

STATUSES = (OK, PARTLY_ZERO, EXPECTED_ZERO, TINY, ZERO, DISCONNECTED, UNSUPPORTED, WRONG)

_WIDTH = 128
_MOST_CAUSES = 6  # lines about causes; all of them are in `causes`


@dataclass(frozen=True)
class ParameterReport:
    """What one parameter gets from the penalty.

    Attributes:
        status: `ok`, `partly_zero`, `expected zero`, `tiny`, `zero`, `disconnected`, `unsupported` or `wrong`.
        blocked: Whether something is lost here.
        zero_share: The share of exact zeros in its gradient, from 0 to 1.
        norm: The norm of its gradient; None where there is none.
        relative: That norm divided by the norm of the gradient of the summed outputs; None where that is unknown.
        text: What torch said, or what disagrees.
    """

    status: str
    blocked: bool = False
    zero_share: float = 0.0
    norm: float | None = None
    relative: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Cause:
    """A module or function that is in the way.

    Attributes:
        name: Its dotted name; for a function that of the module that calls it.
        kind: The class of the module, or the name of the function.
        curvature: `linear`, `piecewise linear`, `partly curved`, `curved`, `raises`, `wrong` or `cut`, as measured.
        remedy: What is known to work.
        low: The smallest input it saw; None where it was not looked at.
        high: The largest.
        text: What torch said, or what was found.
    """

    name: str
    kind: str
    curvature: str
    remedy: str
    low: float | None = None
    high: float | None = None
    text: str = ""

    def __str__(self) -> str:
        span = "" if self.low is None or self.high is None else f", inputs {self.low:.3g} to {self.high:.3g}"
        called = f"{self.name} ({self.kind})" if self.name else self.kind
        return f"{called}: {self.curvature}{span}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True)
class DoubleBackwardReport:
    """Who hears of a penalty, who does not, and why. Made by `check_double_backward`; printed as a short table.

    Attributes:
        penalty: Name of the penalty.
        model: Class of the model.
        examples: Number of examples looked at.
        dtype: Precision of the measurement.
        value: The penalty on this batch; None where it could not be computed.
        parameters: From the name of every trainable parameter to what it gets.
        causes: Modules and functions in the way, each with a remedy; empty where nothing is.
        notes: What else was seen.

    Example:
        >>> import torch, gradreg as gr
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> report = gr.check_double_backward(net, torch.randn(5, 3), (gr.logit(0), gr.Inputs()))
        >>> isinstance(report, gr.DoubleBackwardReport), report.ok, report.parameters["2.bias"].status
        (True, True, 'expected zero')
    """

    penalty: str
    model: str
    examples: int
    dtype: str
    value: float | None
    parameters: dict[str, ParameterReport]
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every parameter gets what it mathematically should, and no part of the model is left out."""
        return not any(parameter.blocked for parameter in self.parameters.values())

    def blocked(self) -> list[str]:
        """Return the names of the parameters that lose something."""
        return [name for name, parameter in self.parameters.items() if parameter.blocked]

    def raise_if_blocked(self) -> None:
        """Do nothing where the report is ok.

        Raises:
            CompatibilityError: If a parameter loses something; the message is the report.
        """
        if not self.ok:
            raise CompatibilityError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, ready for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "BLOCKED"
        head = f"{self.penalty} on {self.model}, {self.examples} examples, {self.dtype}: {verdict}"
        if self.value is not None:
            head += f" (penalty {self.value:.4g})"
        lines = [_cut(head), *_table(self.parameters)]
        texts = {parameter.text for parameter in self.parameters.values() if parameter.blocked and parameter.text}
        shown = " ".join(str(cause) for cause in self.causes)
        lines += [f"torch says: {text}" for text in sorted(texts) if text not in shown][:2]
        if self.causes:
            lines.append("Because of:")
            lines += [f"  {cause}" for cause in self.causes[:_MOST_CAUSES]]
            rest = self.causes[_MOST_CAUSES:]
            if rest:
                lines.append(_cut(f"  and {len(rest)} more: {', '.join(cause.name or cause.kind for cause in rest)}"))
            lines += [f"Remedy: {remedy}" for remedy in dict.fromkeys(c.remedy for c in self.causes if c.remedy)]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)


def _table(parameters: dict[str, ParameterReport]) -> list[str]:
    """Return one line per part and status: the part, how many of its parameters, which."""
    parts: dict[str, list[str]] = {}
    for name in parameters:
        part = name.partition(".")[0] if "." in name else "model"
        parts.setdefault(part if part in ("base", "heads", "models") else "model", []).append(name)
    rows = []
    for part, names in parts.items():
        for status in STATUSES:
            for blocked in (True, False):
                found = [n for n in names if parameters[n].status == status and parameters[n].blocked is blocked]
                if found:
                    rows.append(
                        (part, f"{len(found)} of {len(names)}", _label(status, blocked), _details(found, parameters))
                    )
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [_cut("  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, (*widths, 0), strict=True))) for row in rows]


def _label(status: str, blocked: bool) -> str:
    return f"{status} !" if blocked else status


def _details(names: list[str], parameters: dict[str, ParameterReport]) -> str:
    first = parameters[names[0]]
    if first.status == OK:
        return ""
    share = ""
    if first.status == PARTLY_ZERO:
        shares = [parameters[name].zero_share for name in names]
        share = f"{min(shares):.0%} to {max(shares):.0%} zeros: " if len(names) > 1 else f"{shares[0]:.0%} zeros: "
    shown = ", ".join(names[:4])
    return share + shown + (f", and {len(names) - 4} more" if len(names) > 4 else "")


def _cut(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."
