"""Everybody who computes TracIn scores, each called as its own documentation says.

A contestant takes a problem and a folder for scratch files, and gives scores `[n_test, n_train]`, checkpoint loading
included. Importing happens inside, so that one who is not installed says so and the others run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gradreg.experiments.benchmarks.tracin_problems import Problem, per_example

__all__ = ["CONTESTANTS", "PEERS"]

Contestant = Callable[[Problem, Path], Tensor]


def gradreg(problem: Problem, scratch: Path) -> Tensor:
    import gradreg as gr

    checkpoints = [
        gr.Checkpoint(saved["model"], learning_rate=saved["learning_rate"])
        for saved in (torch.load(path, weights_only=True) for path in problem.checkpoints)
    ]
    tracin = gr.TracIn(problem.model, of=gr.loss(F.cross_entropy), checkpoints=checkpoints, show_progress=False)
    return tracin.influence(problem.train, problem.test)


def brute_force(problem: Problem, scratch: Path) -> Tensor:
    """One backward per example, one matrix product per chunk of training rows."""
    model, total = problem.model, torch.zeros(len(problem.test[1]), len(problem.train[1]))
    parameters = list(model.parameters())

    def rows(x: Tensor, y: Tensor) -> Tensor:
        found = []
        for i in range(len(x)):
            loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            own = torch.autograd.grad(loss, parameters, allow_unused=True)
            found.append(
                torch.cat(
                    [(p if g is None else g).flatten() * (g is not None) for g, p in zip(own, parameters, strict=True)]
                )
            )
        return torch.stack(found)

    for path in problem.checkpoints:
        rate = problem.load(model, path)
        tests = rate * rows(*problem.test)
        for start in range(0, len(problem.train[1]), problem.chunk):
            part = slice(start, start + problem.chunk)
            total[:, part] += tests @ rows(problem.train[0][part], problem.train[1][part]).T
    return total.detach()


def vmap_full(problem: Problem, scratch: Path) -> Tensor:
    """All gradients of training rows at once."""
    return _vmap(problem, len(problem.train[1]))


def vmap_streamed(problem: Problem, scratch: Path) -> Tensor:
    """A chunk of training rows at a time; the gradients of the tests are kept."""
    return _vmap(problem, problem.chunk)


def _vmap(problem: Problem, chunk: int) -> Tensor:
    model, rows = problem.model, per_example(problem.model)
    total = torch.zeros(len(problem.test[1]), len(problem.train[1]))
    for path in problem.checkpoints:
        rate = problem.load(model, path)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        step = chunk if problem.chunk < 128 else len(problem.test[1])  # large models: tests in chunks too
        parts = [rows(parameters, x, y) for x, y in zip(*(side.split(step) for side in problem.test), strict=True)]
        tests = {name: torch.cat([part[name] for part in parts]).flatten(1) for name in parameters}
        del parts
        for start in range(0, len(problem.train[1]), chunk):
            part = slice(start, start + chunk)
            found = rows(parameters, problem.train[0][part], problem.train[1][part])
            for name, test in tests.items():
                total[:, part].addmm_(test, found[name].flatten(1).T, alpha=rate)
    return total


def _captum_arguments(problem: Problem) -> dict[str, object]:
    return {
        "checkpoints": [str(path) for path in problem.checkpoints],
        "checkpoints_load_func": lambda model, path: problem.load(model, Path(path)),
        "batch_size": 128,
    }


def captum_loop(problem: Problem, scratch: Path) -> Tensor:
    from captum.influence import TracInCP

    loss = nn.CrossEntropyLoss(reduction="none")
    method = TracInCP(problem.model, TensorDataset(*problem.train), loss_fn=loss, **_captum_arguments(problem))
    return method.influence(problem.test, k=None)


def captum_sample_wise(problem: Problem, scratch: Path) -> Tensor:
    from captum.influence import TracInCP

    method = TracInCP(
        problem.model,
        TensorDataset(*problem.train),
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        sample_wise_grads_per_batch=True,
        **_captum_arguments(problem),
    )
    return method.influence(problem.test, k=None)


def captum_fast(problem: Problem, scratch: Path) -> Tensor:
    """The last layer alone, by its design."""
    from captum.influence import TracInCPFast

    last = [module for module in problem.model.modules() if isinstance(module, nn.Linear)][-1]
    loss = nn.CrossEntropyLoss(reduction="sum")
    method = TracInCPFast(
        problem.model, last, TensorDataset(*problem.train), loss_fn=loss, **_captum_arguments(problem)
    )
    return method.influence(problem.test, k=None)


def dattri(problem: Problem, scratch: Path) -> Tensor:
    """Its exact setting, without a projection."""
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.task import AttributionTask

    model = problem.model

    def loss(parameters: dict[str, Tensor], example: tuple[Tensor, Tensor]) -> Tensor:
        x, y = example
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    saved = [torch.load(path, weights_only=True) for path in problem.checkpoints]
    task = AttributionTask(loss_func=loss, model=model, checkpoints=[one["model"] for one in saved])
    method = TracInAttributor(
        task=task,
        weight_list=torch.tensor([one["learning_rate"] for one in saved]),
        normalized_grad=False,
        projector_kwargs={"proj_type": "identity"},
    )
    method.projector_kwargs = None
    loaders = [DataLoader(TensorDataset(*side), batch_size=problem.chunk) for side in (problem.train, problem.test)]
    with torch.no_grad():
        return method.attribute(*loaders).T


class _Mappings(Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self._x[row], "y": self._y[row]}


def dattri_llm(problem: Problem, scratch: Path) -> Tensor:
    """One checkpoint at a time, since it takes no learning rates."""
    from dattri_llm import REGISTER_ALL, AttributionArguments, AttributionTask, HookManagerConfig, TracInAttributor

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    total = torch.zeros(())
    for path in problem.checkpoints:
        rate = problem.load(problem.model, path)
        arguments = AttributionArguments(
            output_dir=str(scratch),
            per_device_train_batch_size=128,
            per_device_eval_batch_size=128,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        method = TracInAttributor(arguments, task=AttributionTask(loss_func=loss, model=problem.model))
        score = method.attribute(
            _Mappings(*problem.train),
            _Mappings(*problem.test),
            hook_config=HookManagerConfig(linear_io=REGISTER_ALL),
        )
        total = total + rate * score.agnostic_matrix()[1].T
    return total


def opacus(problem: Problem, scratch: Path) -> Tensor:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(problem.model, loss_reduction="sum")
    parameters = [p for p in wrapped.parameters() if p.requires_grad]

    def rows(x: Tensor, y: Tensor) -> Tensor:
        wrapped.zero_grad(set_to_none=True)
        F.cross_entropy(wrapped(x), y, reduction="sum").backward()
        found = torch.cat([p.grad_sample.flatten(1) for p in parameters if p.grad_sample is not None], 1)
        for p in parameters:
            p.grad_sample = None
        return found

    total = torch.zeros(len(problem.test[1]), len(problem.train[1]))
    try:
        for path in problem.checkpoints:
            rate = problem.load(problem.model, path)
            wrapped.train()  # in eval mode it records nothing; no model here behaves differently
            step = problem.chunk
            tests = torch.cat(
                [rate * rows(x, y) for x, y in zip(*(side.split(step) for side in problem.test), strict=True)]
            )
            for start in range(0, len(problem.train[1]), step):
                part = slice(start, start + step)
                total[:, part] = total[:, part] + tests @ rows(problem.train[0][part], problem.train[1][part]).T
    finally:
        wrapped.to_standard_module()
    return total


CONTESTANTS: dict[str, Contestant] = {
    "gradreg": gradreg,
    "brute force": brute_force,
    "vmap(grad), full": vmap_full,
    "vmap(grad), streamed": vmap_streamed,
    "captum TracInCP, loop": captum_loop,
    "captum TracInCP, sample-wise": captum_sample_wise,
    "captum TracInCPFast": captum_fast,
    "dattri, exact": dattri,
    "dattri-llm": dattri_llm,
    "opacus": opacus,
}
PEERS = {"captum": "captum", "dattri,": "dattri", "dattri-llm": "dattri_llm", "opacus": "opacus"}
"""The package that contestants of that first word need."""
