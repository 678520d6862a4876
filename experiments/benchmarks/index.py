"""An index of many examples times many parameters: throughput, bytes and query time; and that no kill changes a bit.

    python -m gradreg.experiments.benchmarks.index --rows 50000 --json index.json

A network of 999,080 parameters, synthetic examples, one checkpoint, `TwoSidedProjection(16, 16)`. Then, on fewer rows, the
same index is built by a process that is killed (kill -9) in the middle and by two that resume it, and by two workers of
torchrun; the files of all must be equal, bit for bit. One thread per worker.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.benchmarks.diverse_heads import resident
from gradreg.tracin import TwoSidedProjection

MODULE = "gradreg.experiments.benchmarks.index"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 900), nn.ReLU(), nn.Linear(900, 900), nn.ReLU(), nn.Linear(900, 80))


def make_rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 80, (count,), generator=generator)
    centers = torch.randn(80, 128, generator=torch.Generator().manual_seed(9))
    return centers[y] + torch.randn(count, 128, generator=generator), y


def make_tracin() -> gr.TracIn:
    model = make_model()
    checkpoint = gr.Checkpoint(model.state_dict(), learning_rate=0.1)
    projection = TwoSidedProjection(left=16, right=16)
    return gr.TracIn(model, gr.loss(F.cross_entropy), checkpoint, projection=projection, show_progress=False)


def build(rows: int, folder: Path, shard_rows: int) -> dict[str, Any]:
    """Build an index in this process: seconds, memory, bytes."""
    torch.set_num_threads(1)
    tracin, train = make_tracin(), make_rows(rows)
    tracin.influence((train[0][:8], train[1][:8]), (train[0][:2], train[1][:2]))  # what is imported at a first step
    before, started, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    index = tracin.index(train, folder, shard_rows=shard_rows)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    result = {
        "rows": rows,
        "parameters": sum(p.numel() for p in make_model().parameters()),
        "numbers": index.manifest.layout.size,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "examples_per_second": rows / seconds,
        "bytes_per_example": index.nbytes / rows,
        "MiB_while_building": resident("VmHWM") - before,
    }
    times, memory, cpu = [], [], time.process_time()
    for query in range(20):
        tests = make_rows(16, seed=query + 1)
        started = time.perf_counter()
        index.top_k(tests, k=10)
        times.append(time.perf_counter() - started)
        memory.append(resident("VmRSS"))
    result["seconds_per_query_of_16"] = sorted(times)[len(times) // 2]
    result["cpu_seconds_per_query_of_16"] = (time.process_time() - cpu) / len(times)
    result["MiB_grown_over_20_queries"] = memory[-1] - memory[1]
    return result


def digest(folder: Path) -> str:
    """Hash the files of an index."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
    return found.hexdigest()


def command(rows: int, folder: Path, shard_rows: int) -> list[str]:
    arguments = ["--one", str(folder), "--rows", str(rows), "--shard-rows", str(shard_rows)]
    return ["-m", MODULE, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def kill_and_resume(rows: int, folder: Path, shard_rows: int) -> int:
    """Kill a process in the middle of its work, then let two go on; return how many shards had been finished."""
    process = subprocess.Popen(
        [sys.executable, *command(rows, folder, shard_rows)], env=environment(), stdout=subprocess.DEVNULL
    )
    half = -(-rows // shard_rows) // 2
    while len(list(folder.glob("shards/*.safetensors"))) < half and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = len(list(folder.glob("shards/*.safetensors")))
    others = [
        subprocess.Popen(
            [sys.executable, *command(rows, folder, shard_rows)], env=environment(), stdout=subprocess.DEVNULL
        )
        for _ in range(2)
    ]
    if any(other.wait() for other in others):
        raise RuntimeError("a resumed process failed")
    return finished


def with_torchrun(rows: int, folder: Path, shard_rows: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*launcher, *command(rows, folder, shard_rows)], check=True, env=environment(), stdout=subprocess.DEVNULL
    )


def check_bits(rows: int, shard_rows: int) -> dict[str, Any]:
    """Build an index in four ways; say whether all files are equal."""
    root = Path(tempfile.mkdtemp())
    try:
        subprocess.run(
            [sys.executable, *command(rows, root / "one", shard_rows)],
            check=True,
            env=environment(),
            stdout=subprocess.DEVNULL,
        )
        finished = kill_and_resume(rows, root / "killed", shard_rows)
        with_torchrun(rows, root / "torchrun", shard_rows)
        digests = {name: digest(root / name) for name in ("one", "killed", "torchrun")}
    finally:
        shutil.rmtree(root)
    return {
        "rows": rows,
        "shards": -(-rows // shard_rows),
        "finished_before_kill": finished,
        "killed_and_resumed_equals_one": digests["killed"] == digests["one"],
        "torchrun_equals_one": digests["torchrun"] == digests["one"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument(
        "--check-rows", type=int, default=6_000, help="rows of the checks of equal bits; 0 to skip them"
    )
    parser.add_argument("--shard-rows", type=int, default=1_024)
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(build(given.rows, given.one, given.shard_rows)))
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = command(given.rows, Path(folder) / "index", given.shard_rows)
        done = subprocess.run(
            [sys.executable, *arguments], check=True, env=environment(), capture_output=True, text=True
        )
    results: dict[str, Any] = {"build": json.loads(done.stdout)}
    for name, value in results["build"].items():
        print(f"{name:<28} {value:,.3f}" if isinstance(value, float) else f"{name:<28} {value:,}", flush=True)
    if given.check_rows:
        results["bits"] = check_bits(given.check_rows, min(given.shard_rows, -(-given.check_rows // 8)))
        for name, value in results["bits"].items():
            print(f"{name:<28} {value}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")
    if given.check_rows and not (
        results["bits"]["killed_and_resumed_equals_one"] and results["bits"]["torchrun_equals_one"]
    ):
        sys.exit("The files differ.")


if __name__ == "__main__":
    main()
