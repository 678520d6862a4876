"""Traps of double backward, part F (distributed): two gloo processes. What is exact stays exact, what is not is named."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

WORKER = textwrap.dedent(
    """
    import datetime, os, socket
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    import torch.nn.functional as F
    from torch import nn
    from torch.func import functional_call, grad, vmap
    import gradreg as gr

    OF = (gr.logit(0), gr.Inputs())

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    class Penalty(gr.Regularizer):
        def forward(self, model, batch):
            return gr.gradients(model, batch, *OF, differentiable=True)["inputs"].square().sum(1).mean()

    def bypassing(model, x):
        inner = getattr(model, "module", model)
        live = dict(inner.named_parameters())
        g = vmap(grad(lambda xi: functional_call(inner, live, (xi[None],))[0, 0]))(x)
        return g.square().sum(1).mean()

    def close(model, expected, what):
        for a, b in zip(model.parameters(), expected.parameters()):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12, msg=what)

    def worker(rank, port):
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        y = torch.arange(8) % 3
        mine = slice(rank * 4, rank * 4 + 4)
        single, own = make(), make()
        wrapped = nn.parallel.DistributedDataParallel(own)

        # F1, F5: the wrapper itself is called; a mean of terms of examples is that of one process
        objective = gr.Objective(F.cross_entropy, penalty=Penalty(weight=3.0))
        objective(single, gr.Batch(x, y))[0].backward()
        objective(wrapped, gr.Batch(x[mine], y[mine]))[0].backward()
        close(own, single, "F1")
        assert Penalty.additive

        # no collective in the doctor: one rank alone may ask
        if rank == 0:
            report = gr.check_double_backward(wrapped, x[mine], Penalty())
            assert report.ok and not report.notes, str(report)

        # F2: named without running
        static = nn.parallel.DistributedDataParallel(make(), static_graph=True)
        report = gr.check_double_backward(static, x[mine], Penalty())
        assert not report.ok and "static_graph=False" in str(report)

        # F3: a bypassed wrapper is noted; F4: with the task through the wrapper it is exact
        report = gr.check_double_backward(wrapped, x[mine], bypassing)
        assert report.ok and any("bypasses" in note for note in report.notes), str(report)
        single.zero_grad(); wrapped.zero_grad()
        (F.cross_entropy(single(x), y) + bypassing(single, x)).backward()
        (F.cross_entropy(wrapped(x[mine]), y[mine]) + bypassing(wrapped, x[mine])).backward()
        close(own, single, "F4")

        # F8: composable DDP
        from torch.distributed._composable.replicate import replicate
        single.zero_grad(); replicated = replicate(make())
        objective(single, gr.Batch(x, y))[0].backward()
        objective(replicated, gr.Batch(x[mine], y[mine]))[0].backward()
        close(replicated, single, "F8")

        # F6, F7: sharded parameters are refused by name
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        sharded = fully_shard(make(), mesh=init_device_mesh("cpu", (2,)))
        report = gr.check_double_backward(sharded, x[mine], Penalty())
        assert not report.ok and "FSDP" in report.causes[0].kind and "DistributedDataParallel" in str(report)
        dist.destroy_process_group()

    if __name__ == "__main__":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # forked, for nothing has run here yet: the imports are paid once
        mp.start_processes(worker, args=(port,), nprocs=2, start_method="fork")
        print("done")
    """
)


@pytest.mark.dist
def test_f1_to_f8_distributed(tmp_path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "done"
