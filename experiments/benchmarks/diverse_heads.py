"""Time of a training step with diverse heads: plain, by hand, and by gradreg, side by side in one run on one thread.

    python -m gradreg.experiments.benchmarks.diverse_heads --heads 2 8 16 64 128

The contestants take turns within every round, and each row gives medians over rounds: single times mean nothing on a shared
machine, ratios in one run do. Base 1024-512-256, heads 256-64-2, batch 256, Softplus, float32. Peak memory is the growth
of the resident set over one step, measured in a process of its own per contestant.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

import gradreg as gr

BATCH, SIZES, HIDDEN, CLASSES = 256, (1024, 512, 256), 64, 2
Step = Callable[[], Tensor]


def make_model(heads: int, sizes: tuple[int, int, int]) -> gr.SharedBase:
    torch.manual_seed(0)
    first, second, features = sizes
    base = nn.Sequential(nn.Linear(first, second), nn.Softplus(), nn.Linear(second, features), nn.Softplus())

    def make_head() -> nn.Module:
        return nn.Sequential(nn.Linear(features, HIDDEN), nn.Softplus(), nn.Linear(HIDDEN, CLASSES))

    return gr.SharedBase(base, [make_head() for _ in range(heads)])


def plain_loop(model: gr.SharedBase, x: Tensor, y: Tensor) -> Tensor:
    features = model.base(x)
    return sum(F.cross_entropy(head(features), y) for head in model.heads) / len(model.heads)


def plain_vmapped(model: gr.SharedBase, x: Tensor, y: Tensor) -> Tensor:
    features, template = model.base(x), model.heads[0]
    states = [dict(head.named_parameters()) for head in model.heads]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    outputs = vmap(lambda state: functional_call(template, state, (features,)))(stacked)
    return F.cross_entropy(outputs.flatten(0, 1), y.repeat(len(model.heads)))


def by_hand(model: gr.SharedBase, x: Tensor, y: Tensor, similarity: str) -> Tensor:
    """The usual way: one `autograd.grad` per head, a double loop over pairs."""
    features = model.base(x)
    task, gradients = 0.0, []
    for head in model.heads:
        logits = head(features)
        task = task + F.cross_entropy(logits, y)
        top = logits.max(1).values
        gradients.append(torch.autograd.grad(top.sum(), features, create_graph=True)[0])
    penalty, pairs = 0.0, 0
    for i in range(len(gradients)):
        for j in range(i + 1, len(gradients)):
            if similarity == "dot":
                penalty = penalty + (gradients[i] * gradients[j]).sum(1).mean()
            else:
                penalty = penalty + F.cosine_similarity(gradients[i], gradients[j], dim=1).square().mean()
            pairs += 1
    return task / len(gradients) + penalty / pairs


def contestants(heads: int, sizes: tuple[int, int, int] = SIZES) -> dict[str, Step]:
    model = make_model(heads, sizes)
    x, y = torch.randn(BATCH, sizes[0]), torch.randint(0, CLASSES, (BATCH,))
    batch = gr.Batch(x, y)

    def gradreg_step(similarity: str) -> Step:
        penalty = gr.regularizers.DiverseHeads(of=gr.top_logit(), similarity=similarity)
        objective = gr.Objective(F.cross_entropy, diversity=penalty)
        return lambda: objective(model, batch)[0]

    steps: dict[str, Step] = {
        "plain loop": lambda: plain_loop(model, x, y),
        "plain vmapped": lambda: plain_vmapped(model, x, y),
        "by hand dot": lambda: by_hand(model, x, y, "dot"),
        "gradreg dot": gradreg_step("dot"),
        "by hand cosine": lambda: by_hand(model, x, y, "cosine_squared"),
        "gradreg cosine": gradreg_step("cosine_squared"),
    }

    def whole(step: Step) -> Step:
        def run() -> Tensor:
            model.zero_grad(set_to_none=True)
            loss = step()
            loss.backward()
            return loss.detach()

        return run

    return {name: whole(step) for name, step in steps.items()}


def measure(heads: int, rounds: int, slow_rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a step per contestant; they take turns within every round."""
    steps = contestants(heads)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for round_ in range(rounds):
        for name, step in steps.items():
            if round_ >= slow_rounds and name == "by hand cosine":
                continue
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def peak(name: str, heads: int) -> float:
    """Return the growth of memory to its peak over two steps in MiB, from a process of its own."""
    command = [
        sys.executable,
        "-m",
        "gradreg.experiments.benchmarks.diverse_heads",
        "--peak-of",
        name,
        "--heads",
        str(heads),
    ]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def resident(key: str) -> float:
    """Return a field of this process's memory in MiB: VmRSS now, VmHWM its peak (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def print_peak(name: str, heads: int) -> None:
    contestants(4, sizes=(8, 8, 8))[name]()  # what is imported at a first step is not the step's
    step = contestants(heads)[name]
    Path("/proc/self/clear_refs").write_text("5")  # start the peak anew; importing torch has a peak of its own
    before = resident("VmRSS")
    for _ in range(2):
        step()
    print(resident("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[2, 8, 16, 64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak_of:
        print_peak(arguments.peak_of, arguments.heads[0])
        return
    print(f"torch {torch.__version__}, one thread, milliseconds per step (median), peak memory in MiB")
    for heads in arguments.heads:
        rounds = arguments.rounds if heads <= 16 else max(3, arguments.rounds // 2)
        result = measure(heads, rounds, slow_rounds=rounds if heads <= 16 else 1)
        plain = result["plain vmapped"]
        print(f"K = {heads}", flush=True)
        for name, value in result.items():
            memory = "" if arguments.no_memory else f"{peak(name, heads):10.0f} MiB"
            ratio = f"{value / plain:8.2f} x plain vmapped"
            hand = result.get(name.replace("gradreg", "by hand"), value)
            faster = f"{hand / value:8.2f} x faster than by hand" if name.startswith("gradreg") else ""
            print(f"    {name:16}{value:10.1f} ms{ratio}{memory}{faster}", flush=True)


if __name__ == "__main__":
    main()
