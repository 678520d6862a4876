"""What cannot be differentiated as asked, found before any work and named."""

from __future__ import annotations

from torch import nn

from gradreg.errors import CompatibilityError
from gradreg.model._walk import all_modules, walk


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel or DataParallel wrapper, or the model itself."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrappers):
        model = model.module
    return model


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalizes over the batch at this moment."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return False
    return module.training or module.running_mean is None


def train_mode_batch_norms(model: nn.Module, modules: list[nn.Module] | None = None) -> list[str]:
    """Return the names of the modules that normalize over the batch at this moment.

    Args:
        model: The model.
        modules: Its modules, where they are known already.

    Returns:
        The names.
    """
    if not any(map(is_batch_norm, all_modules(model) if modules is None else modules)):
        return []
    return [name for name, module in walk(model) if is_batch_norm(module)]


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of compiled modules; the model itself is called `""`."""
    return [name for name, module in walk(model) if _is_compiled(module)]


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None


def check_compatible(model: nn.Module, *, differentiable: bool) -> None:
    """Refuse models for which the wanted derivative is wrong or does not exist; all problems are listed at once.

    Args:
        model: The model as it will be called, wrappers included.
        differentiable: Whether the gradients will be differentiated again.

    Raises:
        CompatibilityError: If there is a problem.
    """
    if not isinstance(model, nn.Module):
        raise CompatibilityError(
            f"model is a {type(model).__name__}; gradreg needs a torch.nn.Module. Wrap a function in a small Module whose "
            "forward calls it."
        )
    problems = []
    inner = unwrap(model)
    if isinstance(model, nn.parallel.DistributedDataParallel) and getattr(model, "static_graph", False):
        problems.append(
            "DistributedDataParallel(static_graph=True) leaves every rank with its local gradient of a gradient penalty; "
            "wrap the model with static_graph=False."
        )
    for name, module in walk(inner):
        label = f"module {name!r}" if name else "the model"
        if _is_compiled(module) and differentiable:
            problems.append(
                f"{label} is compiled; compiled graphs have no double backward. Pass the uncompiled module "
                "(model._orig_mod, or one on which .compile() was not called), and compile around the whole training step if at "
                "all."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            problems.append(f"{label} has max_norm, which rewrites its weight in the forward; renormalize outside it.")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq and differentiable:
            problems.append(
                f"{label} has scale_grad_by_freq, under which gradients of gradients are wrong; set it to False."
            )
        if isinstance(module, nn.EmbeddingBag) and differentiable:
            problems.append(f"{label} is an EmbeddingBag, which has no double backward; index an Embedding and sum.")
        if any(p is not None and nn.parameter.is_lazy(p) for p in module._parameters.values()):
            problems.append(f"{label} is lazy and has no parameters yet; run one forward first.")
        if "FSDP" in type(module).__name__ and differentiable:
            problems.append(f"{label} is sharded (FSDP); gradients of its gradients are not supported. Use DDP.")
    if problems:
        raise CompatibilityError("The model cannot be differentiated as asked:\n- " + "\n- ".join(problems))


def check_grad_possible(model: nn.Module) -> None:
    """Refuse parameters that no gradient can pass through.

    Raises:
        CompatibilityError: If a parameter was made under inference mode.
    """
    # names are worth looking up only where there is something to tell
    tables = [module._parameters.values() for module in all_modules(model)]
    if not any(parameter is not None and parameter.is_inference() for table in tables for parameter in table):
        return
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise CompatibilityError(
                f"Parameter {name!r} was made under torch.inference_mode(); such tensors can never take part in a "
                "gradient. Build or load the model outside inference mode."
            )
