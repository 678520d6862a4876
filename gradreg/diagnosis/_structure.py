"""Wrappers under which a second derivative is lost or wrong whatever the operations are."""

from __future__ import annotations

from torch import nn

from gradreg.diagnosis._report import Cause
from gradreg.engine import RAISES, WRONG
from gradreg.model import unwrap, walk


def wrapper_causes(model: nn.Module) -> list[Cause]:
    """Return what is wrong with how a model is wrapped, found without running it."""
    causes = []
    if isinstance(model, nn.parallel.DistributedDataParallel) and getattr(model, "static_graph", False):
        causes.append(
            Cause(
                "",
                "DistributedDataParallel(static_graph=True)",
                WRONG,
                "wrap the model with static_graph=False.",
                text="every rank keeps its own gradient of a gradient penalty; nothing is averaged",
            )
        )
    for name, module in walk(unwrap(model)):
        kind = type(module).__name__
        if kind == "OptimizedModule":
            causes.append(
                Cause(
                    name,
                    "OptimizedModule",
                    RAISES,
                    "pass the uncompiled module (model._orig_mod), and compile around the whole training step if at all.",
                    text="torch.compile gives a graph without double backward",
                )
            )
        elif "FSDP" in kind:
            causes.append(
                Cause(
                    name,
                    kind,
                    RAISES,
                    "use DistributedDataParallel.",
                    text="sharded parameters have no double backward",
                )
            )
        elif any(isinstance(parameter, nn.UninitializedParameter) for parameter in module._parameters.values()):
            causes.append(
                Cause(name, kind, RAISES, "run one forward first.", text="it is lazy and has no parameters yet")
            )
    return causes
