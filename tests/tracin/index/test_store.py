"""Shards and manifest: the same bytes whoever computes them, damage named and repaired, other things refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradreg.errors import GradregError
from gradreg.tracin.index._build import build
from gradreg.tracin.index._manifest import IndexMismatchError, Layout, Manifest
from gradreg.tracin.index._scores import BestRows, _best, stream_scores
from gradreg.tracin.index._shards import DamagedIndexError, Shards

ROWS, SIZE, CHECKPOINTS = 23, 5, 2


class Numbers:
    """Rows that depend on their place alone, and in the last bits on the batch, as products of matrices do."""

    rows, checkpoints, size, dtype, batch_rows = ROWS, CHECKPOINTS, SIZE, "float32", 2

    def __init__(self, fail_at=None, delay=0.0, label="a"):
        self.calls, self.loads, self._fail_at, self._delay, self._label = [], [], fail_at, delay, label

    def identity(self):
        return {"spec": {"params": ["*"], "label": self._label}, "data": {"rows": "abc"}}

    @contextlib.contextmanager
    def at(self, checkpoint):
        self.loads.append(checkpoint)

        def read(start, stop):
            if (checkpoint, start) == self._fail_at:
                raise RuntimeError("stopped here")
            time.sleep(self._delay)
            self.calls.append((checkpoint, start, stop))
            place = torch.arange(start, stop, dtype=torch.float32)[:, None]
            vectors = torch.sin(place * (checkpoint + 1) + torch.arange(SIZE)) + (stop - start) * 1e-7
            return vectors, vectors.double().square().sum(1)

        yield read


def layout(shard_rows=4, batch_rows=2):
    return Layout(ROWS, CHECKPOINTS, SIZE, "float32", shard_rows, batch_rows)


def start(folder, source, **sizes):
    return Manifest(source.identity(), layout(**sizes)).write_or_read(folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "shards").iterdir())}


@pytest.fixture
def built(tmp_path):
    source = Numbers()
    manifest = start(tmp_path / "whole", source)
    build(source, tmp_path / "whole", manifest)
    return tmp_path / "whole"


def test_every_checkpoint_is_loaded_once(tmp_path):
    source = Numbers()
    build(source, tmp_path, start(tmp_path, source))
    assert source.loads == [0, 1]
    assert len(source.calls) == len(set(source.calls))


@pytest.mark.parametrize("stop_at", [(0, 0), (0, 4), (0, 6), (0, 20), (1, 0), (1, 22)])
def test_going_on_after_a_failure_gives_the_same_bytes(tmp_path, built, stop_at):
    folder = tmp_path / "other"
    with pytest.raises(RuntimeError, match="stopped here"):
        build(Numbers(fail_at=stop_at), folder, start(folder, Numbers()))
    source = Numbers()
    build(source, folder, start(folder, source))
    assert contents(folder) == contents(built)
    done = [shard for shard in layout().shards() if shard[:2] < (stop_at[0], stop_at[1] - stop_at[1] % 4)]
    assert not {call for call in source.calls if any(call[0] == c and b <= call[1] < e for c, b, e in done)}


def test_going_on_with_another_batch_size_gives_the_same_bytes(tmp_path, built):
    """Row 30."""
    folder = tmp_path / "other"
    with pytest.raises(RuntimeError):
        build(Numbers(fail_at=(1, 4)), folder, start(folder, Numbers()))
    manifest = start(folder, Numbers(), shard_rows=7, batch_rows=3)
    assert manifest.layout == layout()
    build(Numbers(), folder, manifest)
    assert contents(folder) == contents(built)


def test_several_processes_give_the_same_bytes(tmp_path, built):
    folder = tmp_path / "other"
    build(Numbers(delay=0.002), folder, start(folder, Numbers()), workers=3)
    assert contents(folder) == contents(built)
    assert not list((folder / "claims").iterdir())


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_store import Numbers, start
from gradreg.tracin.index._build import build
torch.set_num_threads(1)
source, folder = Numbers(delay=0.02), Path(sys.argv[1])
manifest = start(folder, source)
print("begins", flush=True)
build(source, folder, manifest)
"""


def test_after_kill_9_the_next_attempt_gives_the_same_bytes(tmp_path, built):
    folder = tmp_path / "other"
    command = [sys.executable, "-c", PROGRAM, str(folder), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begins\n"
    while not list(folder.glob("shards/*.safetensors")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    finished = set(contents(folder))
    assert 0 < len(finished) < len(contents(built))
    leftover = folder / "shards" / f".{process.pid}.tmp.checkpoint-000-row-000000000.safetensors"
    leftover.write_bytes(b"half")
    build(Numbers(), folder, start(folder, Numbers()), workers=2)  # and with another number of workers
    assert contents(folder) == contents(built)


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def damage_head(path):
    path.write_bytes(path.read_bytes()[:5])


def damage_bits(path):
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


def damage_other(path):
    path.write_bytes(path.with_name("checkpoint-000-row-000000000.safetensors").read_bytes())


def damage_text(path):
    path.write_text("this is no safetensors file, but long enough to have a length")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (damage_truncate, "truncated"),
        (damage_head, "truncated"),
        (damage_bits, "checksum"),
        (damage_other, "of other rows"),
        (damage_text, "truncated|not a safetensors"),
        (Path.unlink, "missing"),
    ],
)
def test_damaged_shards_are_named_never_read_and_built_again(built, damage, word):
    manifest, whole = Manifest.read(built), contents(built)
    path = built / "shards" / "checkpoint-001-row-000000008.safetensors"
    damage(path)
    with pytest.raises(DamagedIndexError, match=f"{path.name}: .*({word})"):
        Shards(built, manifest).refuse_damage(thorough=True)
    with pytest.raises(DamagedIndexError, match=path.name):
        list(Shards(built, manifest).chunks(10**6))
    source = Numbers()
    with contextlib.nullcontext() if word == "missing" else pytest.warns(UserWarning, match=path.name):
        build(source, built, manifest)
    assert contents(built) == whole
    assert {call[:2] for call in source.calls} == {(1, 8), (1, 10)}


def test_a_shard_of_another_index_is_foreign(tmp_path, built):
    other = Numbers(label="b")
    build(other, tmp_path / "b", start(tmp_path / "b", other))
    name = "checkpoint-000-row-000000004.safetensors"
    (built / "shards" / name).write_bytes((tmp_path / "b" / "shards" / name).read_bytes())
    with pytest.raises(DamagedIndexError, match=f"{name}: of another index"):
        Shards(built, Manifest.read(built)).refuse_damage()


def test_differences_are_spelled_out(built):
    with pytest.raises(IndexMismatchError) as caught:
        start(built, Numbers(label="b"))
    assert "spec.label: 'a' in the index, 'b' now" in str(caught.value)
    assert "data.rows" not in str(caught.value)  # what is equal is not listed
    other = Layout(ROWS + 1, CHECKPOINTS, SIZE, "float32", 4, 2)
    with pytest.raises(IndexMismatchError, match=r"layout\.rows: 23 in the index, 24 now"):
        Manifest(Numbers().identity(), other).write_or_read(built)


def test_folders_without_an_index(tmp_path):
    with pytest.raises(GradregError, match="holds no index"):
        Manifest.read(tmp_path)
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(GradregError, match=r"holds no index \(thesis.txt\)"):
        start(tmp_path, Numbers())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(GradregError, match="damaged"):
        Manifest.read(tmp_path)


def test_a_newer_format_is_refused(built):
    file = built / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(GradregError, match="format 99"):
        Manifest.read(built)


def test_the_first_manifest_wins(tmp_path):
    first = Manifest(Numbers().identity(), layout()).write_or_read(tmp_path)
    second = Manifest(Numbers().identity(), layout(shard_rows=9)).write_or_read(tmp_path)
    assert first == second
    assert os.listdir(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize("max_bytes", [1, 100, 10**9])
def test_streamed_scores_are_the_product(built, max_bytes):
    shards = Shards(built, Manifest.read(built))
    generator = torch.Generator().manual_seed(0)
    tests = [torch.randn(3, SIZE, generator=generator) for _ in range(CHECKPOINTS)]
    weights = torch.rand(CHECKPOINTS, ROWS, generator=generator, dtype=torch.float64)
    rows = torch.arange(ROWS, dtype=torch.float32)[:, None]
    vectors = [torch.sin(rows * (c + 1) + torch.arange(SIZE)) for c in range(CHECKPOINTS)]
    expected = sum((t @ (v * w[:, None].float()).T for t, v, w in zip(tests, vectors, weights, strict=True)))
    found = torch.full((3, ROWS), torch.nan)
    for start_, stop, scores in stream_scores(shards, tests, weights, max_bytes):
        found[:, start_:stop] = scores
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        shards.squared_norms(), torch.stack(vectors).double().square().sum(2), atol=1e-5, rtol=1e-5
    )
    picked = shards.gather([22, 0, 7])
    torch.testing.assert_close(picked[1], vectors[1][[22, 0, 7]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("values", ["distinct", "few", "equal"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("k", [1, 5, 300])
def test_best_rows_are_those_of_a_stable_sort(values, sign, k):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 200, generator=generator)
    if values == "few":
        scores = torch.randint(-2, 3, (4, 200), generator=generator).float()
    if values == "equal":
        scores = torch.zeros(4, 200)
    expected = (sign * scores).sort(dim=1, descending=True, stable=True).indices[:, :k]
    for chunk in (1, 7, 64, 200):
        best = BestRows(k, sign)
        for start_ in range(0, 200, chunk):
            best.add(start_, scores[:, start_ : start_ + chunk])
        found, rows = best.result()
        assert torch.equal(rows, expected)
        assert torch.equal(found, scores.gather(1, expected))
    assert torch.equal(_best(sign * scores, k), expected)


def test_wrong_numbers_of_workers(tmp_path):
    manifest = start(tmp_path, Numbers())
    for workers in (0, True, 1.5):
        with pytest.raises(GradregError, match="workers="):
            build(Numbers(), tmp_path, manifest, workers=workers)
