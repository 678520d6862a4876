"""Integrated gradients of every class of every token: gradreg and captum's loop over targets, in one run on one thread.

    python -m gradreg.experiments.benchmarks.attribution

Token-classification BERT with random weights, its default attention, float32, Gauss-Legendre, the same baseline (token 0).
captum's `LayerIntegratedGradients` is run once per target; in the large case on a sample of targets, whose seconds are
multiplied up. Seconds are CPU time. gradreg is run several times between pieces of captum's loop, so that both see the same
machine, and gives the median. Peak memory is the growth of the resident set, each in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import gradreg as gr

VOCABULARY = 1000


@dataclass(frozen=True)
class Case:
    """A model and the work on it.

    Attributes:
        layers: Layers.
        width: Hidden size.
        tokens: L, tokens of the one example.
        classes: C.
        steps: S, points of the path.
        sample: How many targets captum is run on; None: all.
    """

    layers: int
    width: int
    tokens: int
    classes: int
    steps: int
    sample: int | None = None

    @property
    def targets(self) -> list[tuple[int, int]]:
        """The targets that are compared: all, or some that are spread over tokens and classes."""
        every = [(token, label) for token in range(self.tokens) for label in range(self.classes)]
        if self.sample is None or self.sample >= len(every):
            return every
        return [every[(i * len(every)) // self.sample] for i in range(self.sample)]

    def __str__(self) -> str:
        return (
            f"BERT {self.layers} x {self.width}, L = {self.tokens}, C = {self.classes}, S = {self.steps}: "
            f"{self.tokens * self.classes} targets"
        )


CASES = {
    "large": Case(layers=4, width=256, tokens=64, classes=9, steps=50, sample=18),
    "small": Case(layers=2, width=128, tokens=32, classes=19, steps=20),
    "tiny": Case(layers=1, width=16, tokens=4, classes=3, steps=4),
}


def problem(case: Case) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        intermediate_size=4 * case.width,
        num_labels=case.classes,
        max_position_embeddings=case.tokens,
    )
    model = BertForTokenClassification(config).eval()
    ids = torch.randint(1, VOCABULARY, (1, case.tokens))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def by_gradreg(case: Case, n_steps: int | str, tolerance: float = 0.01) -> tuple[gr.Attribution, float]:
    model, batch = problem(case)
    start = time.process_time()
    result = gr.integrated_gradients(
        model,
        batch,
        gr.all_logits(),
        gr.Embeddings(),
        baseline=gr.token_baseline(0),
        n_steps=n_steps,
        tolerance=tolerance,
        show_progress=False,
    )
    return result, time.process_time() - start


def by_captum(case: Case) -> Iterator[tuple[tuple[int, int], Tensor, float]]:
    """Yield target, scores `[L]` and seconds, one target after the other."""
    from captum.attr import LayerIntegratedGradients

    model, batch = problem(case)
    method = LayerIntegratedGradients(
        lambda ids, mask: model(input_ids=ids, attention_mask=mask).logits, model.bert.embeddings.word_embeddings
    )
    for target in case.targets:
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = method.attribute(
                batch["input_ids"],
                baselines=torch.zeros_like(batch["input_ids"]),
                target=target,
                additional_forward_args=(batch["attention_mask"],),
                n_steps=case.steps,
                method="gausslegendre",
            )
        yield target, found.sum(-1)[0].detach(), time.process_time() - start


def compare(case: Case, repeats: int, captum: bool) -> None:
    """Print seconds, their ratio and the largest difference."""
    by_gradreg(case, case.steps)  # what torch loads at a first forward-mode pass is not part of the work
    runs = [by_gradreg(case, case.steps)]
    result = runs[0][0]
    if captum:
        seconds, largest, every = 0.0, 0.0, max(1, len(case.targets) // max(1, repeats - 1))
        for number, (target, scores, took) in enumerate(by_captum(case)):
            seconds += took
            largest = max(largest, float((scores - result.scores[0, target[0], target[1]]).abs().max()))
            if number % every == every - 1 and len(runs) < repeats:
                runs.append(by_gradreg(case, case.steps))
    while len(runs) < repeats:
        runs.append(by_gradreg(case, case.steps))
    ours = statistics.median(took for _, took in runs)
    assert result.delta is not None
    print(case)
    print(f"    {result.provenance['plan']}")
    gap = float(result.delta.abs().max())
    print(f"    gradreg          {ours:9.2f} s   largest completeness gap {gap:.1e} over all targets")
    if captum:
        count, whole = len(case.targets), case.tokens * case.classes
        theirs = seconds * whole / count
        said = f"{count} of {whole} targets, multiplied up" if count < whole else "all targets"
        print(f"    captum, loop     {theirs:9.2f} s   {said}")
        print(f"    ratio            {theirs / ours:9.1f}     largest difference {largest:.1e} over {count} targets")
    refined, took = by_gradreg(case, "auto", 1e-4)
    apart = float((refined.scores - result.scores).abs().max())
    steps = refined.provenance["steps"]
    print(
        f"    gradreg, auto    {took:9.2f} s   {steps} points for a tolerance of 1e-4, {apart:.1e} from {case.steps} points"
    )


def against_classes(case: Case, counts: tuple[int, ...], repeats: int) -> None:
    """Print seconds for several numbers of classes."""
    print(f"seconds by the number of classes, BERT {case.layers} x {case.width}, L = {case.tokens}, S = {case.steps}")
    cases = [Case(case.layers, case.width, case.tokens, count, case.steps) for count in counts]
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats):
        for each in cases:
            times[each.classes].append(by_gradreg(each, each.steps)[1])
    print("    " + "   ".join(f"C = {count}: {statistics.median(times[count]):.2f} s" for count in counts))


def peak(name: str, who: str) -> float:
    """Return the growth of memory to its peak in MiB, from a process of its own."""
    command = [sys.executable, "-m", "gradreg.experiments.benchmarks.attribution", "--cases", name, "--peak-of", who]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def resident(key: str) -> float:
    """Return a field of this process's memory in MiB: VmRSS now, VmHWM its peak (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def print_peak(case: Case, who: str) -> None:
    def work(on: Case) -> None:
        if who == "gradreg":
            by_gradreg(on, on.steps)
        else:
            next(by_captum(on))  # every target takes the same

    work(CASES["tiny"])  # what is imported at a first call is not the work's
    Path("/proc/self/clear_refs").write_text("5")  # start the peak anew; importing torch has a peak of its own
    before = resident("VmRSS")
    work(case)
    print(resident("VmHWM") - before)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["large", "small"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--classes", type=int, nargs="*", default=[3, 19, 57, 171], help="for the table by classes")
    parser.add_argument("--no-captum", action="store_true", help="only gradreg")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--peak-of", choices=("gradreg", "captum"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.peak_of:
        print_peak(CASES[options.cases[0]], options.peak_of)
        return
    print(f"torch {torch.__version__}, one thread, CPU seconds")
    for name in options.cases:
        compare(CASES[name], options.repeats, captum=not options.no_captum)
        if not options.no_memory:
            who = ("gradreg",) if options.no_captum else ("gradreg", "captum")
            print("    peak memory      " + ", ".join(f"{one} {peak(name, one):.0f} MiB" for one in who), flush=True)
    if options.classes:
        against_classes(CASES[options.cases[-1]], tuple(options.classes), options.repeats)


if __name__ == "__main__":
    main()
