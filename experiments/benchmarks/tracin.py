"""Seconds, memory and error of everybody who computes TracIn scores, side by side in one run on one thread.

    pip install 'gradreg[experiments,bench]'
    python -m gradreg.experiments.benchmarks.tracin --json tracin.json

Three checkpoints, all training rows against all tests, loading included. Each contestant has processes of its own, which
take turns; it is warmed up on 16 x 4 rows. Seconds are the least CPU time over repeats, memory is the growth of the resident
set to its peak, the error is max|S - R| / max|R| against one backward per example in float64 over all parameters. Single
times mean nothing on a shared machine, ratios in one run do. The row "plain pass" is one ordinary forward and backward over
the same examples: nobody who looks at every example can be faster.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F

from gradreg.experiments.benchmarks.diverse_heads import resident
from gradreg.experiments.benchmarks.tracin_contestants import CONTESTANTS, PEERS
from gradreg.experiments.benchmarks.tracin_problems import PROBLEMS, Problem, load_problem, truth

PLAIN = "plain pass"


def plain_pass(problem: Problem, scratch: Path) -> None:
    for path in problem.checkpoints:
        problem.load(problem.model, path)
        for x, y in (problem.test, problem.train):
            for part_x, part_y in zip(x.split(128), y.split(128), strict=True):
                problem.model.zero_grad(set_to_none=True)
                F.cross_entropy(problem.model(part_x), part_y, reduction="sum").backward()


def measure(contestant: str, problem_name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a contestant in this process: least CPU seconds, growth of memory, error."""
    torch.set_num_threads(1)
    run = plain_pass if contestant == PLAIN else CONTESTANTS[contestant]
    problem = load_problem(problem_name, folder)
    few = replace(
        problem, train=tuple(side[:16] for side in problem.train), test=tuple(side[:4] for side in problem.test)
    )
    with tempfile.TemporaryDirectory() as scratch:
        run(few, Path(scratch) / "few")
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # start the peak anew: importing torch has one of its own
        before, times, scores = resident("VmRSS"), [], None
        while not times or (sum(times) < seconds and len(times) < 9):
            started = time.process_time()
            scores = run(problem, Path(scratch) / str(len(times)))
            times.append(time.process_time() - started)
            if len(times) == 1:
                memory = resident("VmHWM") - before
    result = {"seconds": min(times), "repeats": len(times), "MiB": memory}
    if scores is not None:
        expected = truth(problem, folder)
        found = scores[: problem.corner[0], : problem.corner[1]].double()
        same_shape = tuple(scores.shape) == (len(problem.test[1]), len(problem.train[1]))
        result["error"] = float((found - expected).abs().max() / expected.abs().max()) if same_shape else None
        result["shape"] = list(scores.shape)
    return result


def measure_apart(contestant: str, problem: str, folder: Path, seconds: float, limit: float) -> dict[str, Any]:
    """Run a contestant in a process of its own; what keeps it from running is its result."""
    package = next((needed for word, needed in PEERS.items() if contestant.startswith(word)), None)
    if package is not None and importlib.util.find_spec(package) is None:
        return {"absent": f"{package} is not installed"}
    command = [
        sys.executable,
        "-m",
        "gradreg.experiments.benchmarks.tracin",
        "--one",
        contestant,
        "--problems",
        problem,
    ]
    command += ["--folder", str(folder), "--seconds", str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"absent": f"not done after {limit:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"absent": (lines[-1] if lines else f"ended with status {done.returncode}")[:100]}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]  # what measure returned


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Write one table per problem; ratios are to gradreg."""
    lines = []
    for problem, rows in results.items():
        own = rows.get("gradreg", {}).get("seconds")
        lines += ["", f"{problem:<30} {'seconds':>9} {'x gradreg':>10} {'MiB':>7} {'error':>9}"]
        for name, row in rows.items():
            if "absent" in row:
                lines.append(f"  {name:<28} {row['absent']}")
                continue
            ratio = f"{row['seconds'] / own:.2f}" if own else "-"
            error = f"{row['error']:.1e}" if row.get("error") is not None else "-"
            lines.append(f"  {name:<28} {row['seconds']:>9.3f} {ratio:>10} {row['MiB']:>7.0f} {error:>9}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--contestants", nargs="+", default=[*CONTESTANTS, PLAIN], choices=[*CONTESTANTS, PLAIN])
    parser.add_argument("--seconds", type=float, default=6.0, help="repeats of a contestant go on until then")
    parser.add_argument("--limit", type=float, default=900.0, help="wall seconds per contestant and problem")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gradreg-benchmark-tracin")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peers
            result = measure(given.one, given.problems[0], given.folder, given.seconds)
        print(json.dumps(result))
        return
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for problem in given.problems:
        try:
            truth(load_problem(problem, given.folder), given.folder)
        except ModuleNotFoundError as error:
            print(f"{problem}: left out, {error}", file=sys.stderr)
            continue
        results[problem] = {}
        for contestant in given.contestants:
            print(f"{problem}: {contestant} ...", file=sys.stderr, flush=True)
            results[problem][contestant] = measure_apart(contestant, problem, given.folder, given.seconds, given.limit)
        print(table({problem: results[problem]}), flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
