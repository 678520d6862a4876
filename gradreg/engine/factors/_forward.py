"""One recorded forward of a model, laid out as found."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._checks import closes_over
from gradreg.engine._coupling import check_uncoupled
from gradreg.engine._evaluate import check_targets, evaluate
from gradreg.engine._observe import observe
from gradreg.engine._points import Points
from gradreg.engine._request import Request
from gradreg.engine.factors._axes import CallAxes
from gradreg.engine.factors._consumers import consumers
from gradreg.engine.factors._record import Call, recorded
from gradreg.errors import CompatibilityError
from gradreg.model import walk


@dataclass
class Layout:
    """What is known of a model under a scalar: where the examples are, and which parameters the rules serve.

    Attributes:
        axes: By call.
        expanded: Calls whose input, the same for all examples, is repeated: along its leading axis of length one, or along
            a new one.
        refused: From the name of a parameter to the reason why the rules do not serve it.
        looped: Calls whose module vmap refuses: pulled back one example at a time.
        everywhere: Whether all modules are recorded, not only those that hold parameters: where one is used by a module
            that does not hold it.
        unseen: Parameters whose gradients were zero in all comparisons with autograd, so that nothing is known of them.
    """

    axes: dict[tuple[str, int], CallAxes | None] = field(default_factory=dict)
    expanded: dict[tuple[str, int], bool] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    looped: set[tuple[str, int]] = field(default_factory=set)
    everywhere: bool = False
    unseen: set[str] = field(default_factory=set)


@dataclass
class Pass:
    """One forward with what it recorded.

    Attributes:
        calls: Of modules.
        scalars: `[n, *targets]`.
        used: From parameter to the numbers of the nodes that read it.
        moving: Whether examples may be at other places inside, depending on the data.
    """

    calls: dict[tuple[str, int], Call]
    scalars: Tensor
    used: dict[str, list[int]]
    moving: bool


def run_forward(request: Request, batch: Batch, layout: Layout) -> Pass:
    """Run one forward; must be surrounded by `grad_mode` and `preserved`."""
    with recorded(_watched(request, layout.everywhere), layout.expanded, len(batch)) as calls:
        capture = observe(request.model, batch, Points(), copies=False, heads_apart=True)
    check_targets(request.of, capture.outputs, batch)
    try:
        scalars = evaluate(request.of, capture.outputs, capture.batch, request.heads)
    except (RuntimeError, IndexError) as problem:
        if len(batch) == len(request.batch):
            raise
        raise closes_over(request.of, problem) from problem
    if not scalars.requires_grad:
        raise CompatibilityError(
            f"of={request.of!r} carries no graph to the parameters {', '.join(map(repr, list(request.params)[:3]))}...: is the "
            "path cut by detach() or no_grad()?"
        )
    check_uncoupled(scalars, request.params.values(), capture.normalized, "the parameters")
    scalars = scalars.sum(1) if request.over_heads else scalars
    return Pass(dict(calls), scalars, *consumers(scalars, request.params))


def _watched(request: Request, everywhere: bool) -> dict[str, nn.Module]:
    """Return the modules that hold a wanted parameter themselves, or all below the model, by name."""
    wanted = {id(parameter) for parameter in request.params.values()}
    return {
        name: module
        for name, module in walk(request.inner)
        if any(id(parameter) in wanted for parameter in module._parameters.values()) or (everywhere and name)
    }
