"""Two gloo processes: a model wrapped in DDP trains as one process on the whole batch."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

WORKER = textwrap.dedent(
    """
    import os, sys, datetime
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    import torch.nn.functional as F
    from torch import nn
    import gradreg as gr
    from gradreg.errors import CompatibilityError

    def make(count):
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        heads = [nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 3)) for _ in range(count)]
        return gr.SharedBase(base, heads).double()

    def check(rank, count):
        x, y = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3
        objective = gr.Objective(
            F.cross_entropy,
            features=gr.regularizers.DiverseHeads(weight=2.0),
            inputs=gr.regularizers.DiverseHeads(weight=1.0, wrt=gr.Inputs()),
            slope=gr.regularizers.InputGradient(weight=0.5),
            curve=gr.regularizers.CURE(weight=0.5, h=0.5),  # takes a second forward
        )
        single, own = make(count), make(count)
        wrapped = nn.parallel.DistributedDataParallel(own)
        for step in range(3):
            single.zero_grad(); wrapped.zero_grad()
            objective(single, gr.Batch(x, y))[0].backward()
            objective(wrapped, gr.Batch(x[rank * 4 : rank * 4 + 4], y[rank * 4 : rank * 4 + 4]))[0].backward()
            for (name, a), b in zip(single.named_parameters(), own.parameters()):
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-10, atol=1e-12, msg=f"{count} heads, step {step}, {name}")
            for p in (*single.parameters(), *own.parameters()):
                p.data.sub_(0.1 * p.grad)
        static = nn.parallel.DistributedDataParallel(make(count), static_graph=True)
        try:
            objective(static, gr.Batch(x, y))
        except CompatibilityError as problem:
            assert "static_graph=False" in str(problem)
        else:
            raise AssertionError("static_graph=True was not refused")

    def worker(rank, port, counts):
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
        for count in counts:
            check(rank, count)
        dist.destroy_process_group()

    if __name__ == "__main__":
        import socket
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # forked, for nothing has run here yet: the imports are paid once
        mp.start_processes(worker, args=(port, [int(count) for count in sys.argv[1:]]), nprocs=2, start_method="fork")
        print("equal")
    """
)


@pytest.mark.dist
def test_ddp_equals_one_process(tmp_path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    run = subprocess.run([sys.executable, str(script), "2", "5"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "equal"
