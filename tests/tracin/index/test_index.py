"""GradientIndex: the scores of TracIn, from disk, for any split of the work; other things are refused."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import gradreg as gr
from gradreg.errors import BatchError, GradregError, NonFiniteLossError
from gradreg.tracin import DenseProjection, TwoSidedProjection
from gradreg.tracin.index import DamagedIndexError, IndexMismatchError


def net(seed=0):
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def toy():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (11,), generator=generator)
    xt = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return (x, y), (xt, torch.randint(0, 3, (4,), generator=generator))


def tracin(of=None, checkpoints=None, model=None, **options):
    if checkpoints is None:
        checkpoints = [gr.Checkpoint(net(seed).state_dict(), rate) for seed, rate in ((0, 0.1), (1, 0.05))]
    return gr.TracIn(model or net(), of or gr.loss(F.cross_entropy), checkpoints, **{"show_progress": False, **options})


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_known_values(tmp_path, toy):
    one = tracin(checkpoints=gr.Checkpoint(net().state_dict(), 1.0))
    scores = one.index(toy[0], tmp_path / "i").influence(toy[1])
    assert float(scores[0, 0]) == pytest.approx(-0.488627, abs=1e-6)
    assert float(scores.sum()) == pytest.approx(4.399817, abs=1e-6)
    own = one.index(toy[0], tmp_path / "i").self_influence()
    assert float(own.sum()) == pytest.approx(28.686189, abs=1e-6)


@pytest.mark.parametrize("normalize", [False, "cosine", "relatif"])
@pytest.mark.parametrize(
    "projection", [None, TwoSidedProjection(2, 3), DenseProjection(9)], ids=["exact", "two", "dense"]
)
def test_scores_are_those_of_tracin(tmp_path, toy, normalize, projection):
    one = tracin(normalize=normalize, projection=projection, test_of=gr.true_logit())
    index = one.index(toy[0], tmp_path, shard_rows=4)
    expected = one.influence(*toy)
    torch.testing.assert_close(index.influence(toy[1]), expected, rtol=1e-10, atol=1e-12)
    found, wanted = index.top_k(toy[1], k=3), one.top_k(*toy, k=3)
    for which in ("proponents", "opponents"):
        assert getattr(found, which).rows == getattr(wanted, which).rows
        torch.testing.assert_close(getattr(found, which).scores, getattr(wanted, which).scores, rtol=1e-10, atol=1e-12)
        assert torch.equal(getattr(found, which).columns, getattr(wanted, which).columns)
    assert index.top_k(toy[1], 3, sign=-1).rows == wanted.opponents.rows


def test_steps_of_an_optimizer(tmp_path, toy):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(toy[0][0]), toy[0][1]).backward()
        optimizer.step()
    checkpoint = gr.Checkpoint(model.state_dict(), 0.01, optimizer=optimizer.state_dict())
    one = tracin(checkpoints=checkpoint, update="optimizer")
    index = one.index(toy[0], tmp_path)
    torch.testing.assert_close(index.influence(toy[1]), one.influence(*toy), rtol=1e-10, atol=1e-12)
    with pytest.raises(GradregError, match="steps of the optimizer"):
        index.self_influence()


def test_little_memory_changes_nothing(tmp_path, toy):
    index = tracin().index(toy[0], tmp_path)
    small = tracin(memory=4096, chunk_size=3)
    again = small.index(toy[0], tmp_path)
    assert torch.equal(again.top_k(toy[1], k=4).proponents.columns, index.top_k(toy[1], k=4).proponents.columns)
    torch.testing.assert_close(again.influence(toy[1]), index.influence(toy[1]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_files_do_not_depend_on_workers(tmp_path, toy, workers):
    tracin(chunk_size=2).index(toy[0], tmp_path / "one", shard_rows=4)
    tracin(chunk_size=2).index(toy[0], tmp_path / "many", shard_rows=4, workers=workers)
    assert files(tmp_path / "many") == files(tmp_path / "one")


def test_resume_with_another_batch_size(tmp_path):
    """Row 30: 100 rows in batches of 64, stopped, resumed in batches of 36: as uninterrupted."""
    generator = torch.Generator().manual_seed(0)
    train = (torch.randn(100, 5, generator=generator).double(), torch.randint(0, 3, (100,), generator=generator))
    tracin(chunk_size=64).index(train, tmp_path / "whole")
    whole = files(tmp_path / "whole")
    tracin(chunk_size=64).index(train, tmp_path / "part")
    (tmp_path / "part" / "shards" / "checkpoint-001-row-000000000.safetensors").unlink()
    tracin(chunk_size=36, memory="10 MB").index(train, tmp_path / "part", workers=2)
    assert files(tmp_path / "part") == whole


def test_a_stopped_run_goes_on(tmp_path, toy, monkeypatch):
    tracin().index(toy[0], tmp_path / "whole", shard_rows=4)
    from gradreg.tracin.index._shards import Shards

    count, write = [], Shards.write

    def stop(self, *arguments):
        count.append(1)
        if len(count) == 4:
            raise KeyboardInterrupt
        write(self, *arguments)

    monkeypatch.setattr(Shards, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        tracin().index(toy[0], tmp_path / "part", shard_rows=4)
    monkeypatch.undo()
    assert len(files(tmp_path / "part")) < len(files(tmp_path / "whole"))
    tracin().index(toy[0], tmp_path / "part", shard_rows=4)
    assert files(tmp_path / "part") == files(tmp_path / "whole")


def other_checkpoints(rates=(0.1, 0.05), seeds=(0, 1)):
    return [gr.Checkpoint(net(seed).state_dict(), rate) for seed, rate in zip(seeds, rates, strict=True)]


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (
            {"checkpoints": other_checkpoints(rates=(0.1, 0.2))},
            "checkpoints.1.learning_rate: 0.05 in the index, 0.2 now",
        ),
        ({"checkpoints": other_checkpoints(seeds=(0, 2))}, "checkpoints.1.weights: "),
        ({"checkpoints": other_checkpoints()[:1]}, "layout.checkpoints: 2 in the index, 1 now"),
        ({"params": "0.*"}, "spec.params.0: '0.bias' in the index"),
        ({"of": gr.true_logit()}, "spec.of"),
        ({"normalize": "cosine"}, "spec.normalize: False in the index, 'cosine' now"),
        ({"projection": DenseProjection(4)}, "projection.size: nothing in the index, 4 now"),
    ],
)
def test_another_spec_is_refused_with_the_difference(tmp_path, toy, options, difference):
    tracin().index(toy[0], tmp_path)
    before = files(tmp_path)
    if difference.startswith("spec.params"):
        difference = "layout.size: 66 in the index, 42 now"
    with pytest.raises(IndexMismatchError, match=re.escape(difference)):
        tracin(**options).index(toy[0], tmp_path)
    assert files(tmp_path) == before


def test_another_seed_of_a_projection_is_refused(tmp_path, toy):
    tracin(projection=DenseProjection(4)).index(toy[0], tmp_path)
    with pytest.raises(IndexMismatchError, match=r"projection\.seed: 0 in the index, 1 now"):
        tracin(projection=DenseProjection(4, seed=1)).index(toy[0], tmp_path)


def test_another_model_or_other_data_are_refused(tmp_path, toy):
    tracin().index(toy[0], tmp_path)
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    with pytest.raises(IndexMismatchError, match=r"model\.structure"):
        tracin(model=other).index(toy[0], tmp_path)
    changed = toy[0][0].clone()
    changed[3, 1] += 1e-9
    with pytest.raises(IndexMismatchError, match=r"data\.fingerprint"):
        tracin().index((changed, toy[0][1]), tmp_path)
    with pytest.raises(IndexMismatchError, match=r"data\.rows: 11 in the index, 10 now"):
        tracin().index((toy[0][0][:10], toy[0][1][:10]), tmp_path)


def test_damage_is_named_and_repaired(tmp_path, toy):
    index = tracin().index(toy[0], tmp_path, shard_rows=4)
    before, expected = files(tmp_path), index.influence(toy[1])
    shard = tmp_path / "shards" / "checkpoint-000-row-000000004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    fresh = tracin()
    with pytest.warns(UserWarning, match=f"{shard.name} is truncated"):
        again = fresh.index(toy[0], tmp_path)
    assert files(tmp_path) == before
    assert torch.equal(again.influence(toy[1]), expected)
    shard.unlink()
    with pytest.raises(DamagedIndexError, match=f"{shard.name}: missing"):
        type(again)(tmp_path, fresh.spec, again._train, again.manifest, memory=10**6)


def test_merged_datasets_and_loaders(tmp_path, toy):
    """Row 23: rows are known by dataset and place."""
    (x, y), test = toy
    parts = {"a": TensorDataset(x[:6], y[:6]), "b": TensorDataset(x[6:], y[6:])}
    one = tracin()
    index = one.index(parts, tmp_path)
    best = one.influence(toy[0], test).argmax(1).tolist()
    expected = [("a", row) if row < 6 else ("b", row - 6) for row in best]
    assert [line[0] for line in index.top_k(test, 1).proponents.rows] == expected
    loader = torch.utils.data.DataLoader(TensorDataset(*test), batch_size=3, drop_last=True)
    assert torch.equal(index.influence(loader), index.influence(test))


def test_verify(tmp_path, toy):
    exact = tracin().index(toy[0], tmp_path / "exact").verify(11)
    assert exact.relative_error < 1e-12
    assert exact.spearman == pytest.approx(1)
    assert exact.top_overlap == 1
    errors = []
    for size in (8, 4096):
        found = tracin(projection=DenseProjection(size)).index(toy[0], tmp_path / f"{size}").verify(11)
        errors.append(found)
        one = tracin().influence(toy[0], toy[0])
        other = tracin(projection=DenseProjection(size)).influence(toy[0], toy[0])
        assert found.relative_error == pytest.approx(float((one - other).abs().max() / one.abs().max()))
    assert errors[0].relative_error > 3 * errors[1].relative_error > 0
    assert errors[1].spearman > 0.98
    assert "Spearman" in str(errors[0])
    subset = tracin(projection=DenseProjection(8)).index(toy[0], tmp_path / "8")
    assert subset.verify(5, seed=1) == subset.verify(5, seed=1)


def test_scores_to_a_file(tmp_path, toy):
    index = tracin().index(toy[0], tmp_path / "i")
    scores = index.influence(toy[1], out=tmp_path / "scores.npy")
    assert np.array_equal(np.load(tmp_path / "scores.npy"), index.influence(toy[1]).numpy())
    assert torch.equal(scores, index.influence(toy[1]))


def test_the_model_and_threads_are_as_before(tmp_path, toy):
    model = net(5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.set_num_threads(2)
    try:
        tracin(model=model).index(toy[0], tmp_path).top_k(toy[1], 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_broken_example_is_named(tmp_path, toy):
    (x, y), _ = toy
    x = x.clone()
    x[2, 0] = torch.nan
    with pytest.raises(NonFiniteLossError, match="train row 2"):
        tracin().index((x, y), tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda index, test: index.top_k(test, 0), "k=0; allowed are integers from 1 to the 11"),
        (lambda index, test: index.top_k(test, 12), "k=12"),
        (lambda index, test: index.top_k(test, 2, 3), "sign=3"),
        (lambda index, test: index.verify(1), "k=1; allowed are integers from 2"),
        (lambda index, test: index.influence((test[0][:0], test[1][:0])), "empty"),
    ],
)
def test_wrong_arguments(tmp_path, toy, call, expected):
    index = tracin().index(toy[0], tmp_path)
    with pytest.raises((GradregError, BatchError), match=expected):
        call(index, toy[1])


def test_an_index_too_large_is_refused_with_the_numbers(tmp_path, toy):
    text = "11 examples x 2 checkpoints x 66 numbers of float64; max_size is 0.0 GiB"
    with pytest.raises(GradregError, match=text):
        tracin().index(toy[0], tmp_path / "i", max_size="10 kB")
    assert not (tmp_path / "i").exists()
    with pytest.raises(GradregError, match="shard_rows=0"):
        tracin().index(toy[0], tmp_path / "i", shard_rows=0)


def test_memory_does_not_grow_over_queries(tmp_path):
    """Row 31: 50 queries; the resident set stays where it was after the first ones."""
    code = """
import sys, torch, torch.nn.functional as F
from pathlib import Path
import gradreg as gr
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
train = (torch.randn(3000, 32), torch.randint(0, 10, (3000,)))
tracin = gr.TracIn(net, gr.loss(F.cross_entropy), gr.Checkpoint(net.state_dict(), 0.1), show_progress=False, memory="8 MiB")
index = tracin.index(train, sys.argv[1])
def resident():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
seen = []
for query in range(50):
    index.top_k((torch.randn(8, 32), torch.randint(0, 10, (8,))), k=5)
    seen.append(resident())
print(index.nbytes / 2**20, seen[4], max(seen[5:]))
"""
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    size, early, late = map(float, found.stdout.split())
    assert size > 15
    assert late < early + 0.4 * size  # were the shards mapped, or anything kept, all of them would be resident
    assert late < 1.05 * early


def test_a_folder_that_cannot_be_made_is_refused_before_work(tmp_path, toy):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file", tmp_path / "file" / "index"):
        with pytest.raises(GradregError, match="cannot be made"):
            tracin().index(toy[0], path)
    assert (tmp_path / "file").read_text() == "kept"
