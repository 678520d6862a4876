"""Second derivatives along given directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._gradients import gradients
from gradreg.engine._observe import grad_mode
from gradreg.engine._recorder import attached
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Inputs


def curvature(model: nn.Module, batch: Batch, of: ScalarFunction, wrt: Inputs, directions: Tensor) -> Tensor:
    r"""Return $v^\top H v$ with graph, H the Hessian of each scalar with respect to one input.

    Reverse over reverse; normalizations are written out, so that its own derivative, the third, is right.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: The input, by name.
        directions: v, `[n, k, *shape of the input]`.

    Returns:
        `[n, *targets, k]`, with heads `[n, K, *targets, k]`.
    """
    name = wrt.name or "inputs"
    point = attached(batch.named_inputs()[name], keep_graph=True)
    with grad_mode():
        first = gradients(model, batch, of, wrt, at={name: point}, differentiable=True)[name]
        own = point.dim() - 1
        lead = first.shape[: first.dim() - own]
        rows = first.reshape(lead[0], -1, *point.shape[1:])
        axes = tuple(range(1, own + 1))
        columns = []
        for target in rows.unbind(1):
            for direction in directions.unbind(1):
                slope = (target * direction).sum()
                second = None
                if slope.requires_grad:
                    (second,) = torch.autograd.grad(slope, point, create_graph=True, allow_unused=True)
                if second is None:
                    second = torch.zeros_like(point)
                columns.append((second * direction).sum(axes))
    return torch.stack(columns, 1).reshape(*lead, directions.shape[1])
