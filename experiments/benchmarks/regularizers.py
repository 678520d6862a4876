"""Cost of a training step with every regularizer: over the plain step, and beside the usual hand-written way, in one run.

    python -m gradreg.experiments.benchmarks.regularizers --only IGA Fishr
    python -m gradreg.experiments.benchmarks.regularizers --json docs/regularizer_costs.json

The second writes what `python -m gradreg.experiments.regularizer_page` reads.

The three contestants, the plain step, by hand and gradreg, take turns within every round, on one thread; medians over rounds
of the processor time are given, which waiting for others on a shared machine does not enter. Ratios within one run mean
something, single times do not. Before anything is measured, both ways must give the same loss and the same gradients. Models and
batches are in `contests.py`: batch 256, 1024-512-256 with Softplus, 8 heads, 4 environments, 4 projections, float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.benchmarks.contests import CONTESTS, WEIGHT, Contest

Step = Callable[[], Tensor]


def steps_of(contest: Contest) -> dict[str, Step]:
    """Return the plain step, the one by hand and the one with gradreg: forward, loss and backward."""
    model, batch = contest.model, contest.batch
    objective = gr.Objective(contest.task, penalty=contest.penalty)
    contest.penalty.weight = gr.schedules.Constant(WEIGHT)
    shared = isinstance(model, gr.SharedBase)

    def task(outputs: Tensor) -> Tensor:
        targets = batch.targets
        if isinstance(model, (gr.SharedBase, gr.Ensemble)):
            return contest.task(outputs.flatten(0, 1), targets.repeat_interleave(outputs.shape[1]))
        return contest.task(outputs, targets)

    def plain() -> Tensor:
        return task(model(batch.inputs))

    def by_hand() -> Tensor:
        x = batch.inputs.detach().requires_grad_() if contest.input_grad else batch.inputs
        if shared:  # one pass of the base; the heads again, one by one, for their gradients
            features = model.base(x)
            outputs = torch.stack([head(features) for head in model.heads], 1)
            return task(outputs) + WEIGHT * contest.by_hand(x, features)
        outputs = torch.stack([m(x) for m in model.models], 1) if isinstance(model, gr.Ensemble) else model(x)
        return task(outputs) + WEIGHT * contest.by_hand(x, outputs)

    losses = {"plain": plain, "by hand": by_hand, "gradreg": lambda: objective(model, batch)[0]}
    return {name: whole(model, batch, loss) for name, loss in losses.items()}


def whole(model: nn.Module, batch: gr.Batch, loss: Step) -> Step:
    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        batch.inputs.grad = None
        value = loss()
        value.backward()
        return value.detach()

    return run


def check_same(name: str, contest: Contest, steps: dict[str, Step]) -> None:
    """Refuse to compare two ways that do not compute the same."""
    found = []
    for way in ("by hand", "gradreg"):
        value = steps[way]()
        named = [("the loss", value), *((key, p.grad) for key, p in contest.model.named_parameters())]
        found.append([(key, None if item is None else item.clone()) for key, item in named])
    for (key, one), (_, two) in zip(*found, strict=True):
        if one is not None and two is not None and float((one - two).norm()) > 2e-3 * float(one.norm()) + 1e-7:
            raise SystemExit(f"{name}: by hand and gradreg differ in {key} by {float((one - two).norm()):.3g}.")


def measure(name: str, rounds: int) -> tuple[Contest, dict[str, float]]:
    """Return the median milliseconds of a step per contestant; they take turns within every round."""
    torch.manual_seed(0)
    contest = CONTESTS[name]()
    steps = steps_of(contest)
    check_same(name, contest, steps)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            start = time.process_time()
            step()
            times[way].append((time.process_time() - start) * 1e3)
    return contest, {way: statistics.median(values) for way, values in times.items()}


def write(path: Path, rounds: int, name: str, ratios: dict[str, float]) -> None:
    """Put the ratios of one regularizer to the plain step into a JSON file, with how they were measured."""
    found = json.loads(path.read_text()) if path.exists() else {"costs": {}}
    cores = f"one thread of a machine with {os.cpu_count()} {platform.machine()} cores"
    how = {"date": date.today().isoformat(), "torch": torch.__version__, "machine": cores, "rounds": rounds}
    found["costs"][name] = {**{way: round(ratio, 3) for way, ratio in ratios.items()}, **how}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CONTESTS), default=list(CONTESTS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures here; those of names left out are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, medians of {arguments.rounds} rounds; times the plain step")
    print(f"{'':30}{'plain':>10}{'by hand':>10}{'gradreg':>10}{'faster':>10}")
    for name in arguments.only:
        contest, found = measure(name, arguments.rounds)
        plain, hand, own = found["plain"], found["by hand"], found["gradreg"]
        mark = "several" if contest.several else ""
        print(f"{name:30}{plain:7.1f} ms{hand / plain:9.2f}x{own / plain:9.2f}x{hand / own:9.2f}x  {mark}", flush=True)
        if arguments.json:
            write(arguments.json, arguments.rounds, name, {"by_hand": hand / plain, "gradreg": own / plain})


if __name__ == "__main__":
    main()
