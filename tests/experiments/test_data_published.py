"""data=collages: the published folder layout, in small."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from gradreg.experiments.data import PublishedCollages
from gradreg.experiments.data.splits import DataError

BLOCKS = ("mnist", "cifar", "fashion", "svhn")


def write_version(root, blocks=BLOCKS, size=(16, 16), count=6, ordered=True):
    random = np.random.default_rng(0)
    sets = ["train-all", "val-all", *(f"test-{b}" for b in blocks), *(f"train-{b}-forUpperBoundsOnly" for b in blocks)]
    for name in sets:
        for label in (0, 1):
            folder = root / name / str(label)
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 120, size, dtype=np.uint8) + np.uint8(120 * label)
                Image.fromarray(pixels).save(folder / f"{number + 1:06d}.png")
    (root / "options.json").write_text(json.dumps({"randomBlockOrder": not ordered}))
    return str(root)


@pytest.mark.parametrize(("blocks", "size"), [(BLOCKS, (16, 16)), (BLOCKS[:2], (16, 8))])
@pytest.mark.parametrize("ordered", [True, False])
def test_reads_the_published_layout(tmp_path, blocks, size, ordered):
    folder = write_version(tmp_path / "version", blocks, size, ordered=ordered)
    data = PublishedCollages(folder).load()
    assert data.parts == blocks
    assert tuple(data.train.inputs.shape) == (12, *size)
    assert 0 <= data.train.inputs.min() < data.train.inputs.max() <= 1
    assert data.train.targets.tolist() == [0] * 6 + [1] * 6
    first = np.asarray(Image.open(tmp_path / "version" / "train-all" / "0" / "000001.png"))
    np.testing.assert_allclose(data.train.inputs[0].numpy(), first / 255, rtol=1e-6)
    assert set(data.test) == {"id", *blocks}
    assert all(len(data.test[b]) + len(data.validation[b]) == 12 for b in blocks)
    assert all(set(data.test[b].targets.tolist()) == {0, 1} == set(data.validation[b].targets.tolist()) for b in blocks)
    assert set(data.upper_bounds) == set(blocks)
    assert set(data.boxes) == (set(blocks) if ordered else set())
    if ordered and len(blocks) == 4:
        assert data.boxes["cifar"] == (8, 0, 8, 8)  # below mnist, for the tiles go by columns


def test_limit(tmp_path):
    folder = write_version(tmp_path / "version")
    assert len(PublishedCollages(folder, limit=2).load(upper_bounds=False).train) == 4


def test_trains_on_it(tmp_path, started):
    folder = write_version(tmp_path / "version", count=10)
    run = started("data=collages", f"data.folder={folder}", "base.components=4", "arms=[penalty]")
    assert set(run.read("results.json")["upper_bound"]) == set(BLOCKS)


def test_missing_folders(tmp_path):
    folder = write_version(tmp_path / "version")
    with pytest.raises(DataError, match="does not exist"):
        PublishedCollages(str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"Did you mean .*version"):
        PublishedCollages(str(tmp_path))
    (tmp_path / "version" / "val-all").rename(tmp_path / "version" / "validation-all")
    with pytest.raises(DataError, match=r"val-all/0' is missing.*Sets found: .*validation-all"):
        PublishedCollages(folder).load()


def test_upper_bound_sets_may_be_absent_if_not_wanted(tmp_path):
    folder = write_version(tmp_path / "version", blocks=("mnist",), size=(8, 8))
    (tmp_path / "version" / "train-mnist-forUpperBoundsOnly").rename(tmp_path / "elsewhere")
    assert PublishedCollages(folder).load(upper_bounds=False).parts == ("mnist",)
    with pytest.raises(DataError, match="Set upper_bound=null"):
        PublishedCollages(folder).load()


def test_git_lfs_pointers_are_recognized(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "collages.zip").write_text(pointer)
    with pytest.raises(DataError, match="Git-LFS pointer"):
        PublishedCollages(str(tmp_path / "collages.zip"))
    folder = write_version(tmp_path / "version")
    (tmp_path / "version" / "train-all" / "1" / "000002.png").write_text(pointer)
    with pytest.raises(DataError, match=r"train-all/1/000002.png' is a Git-LFS pointer"):
        PublishedCollages(folder).load()


@pytest.mark.parametrize(
    ("name", "image", "expected"),
    [
        ("train-all/0/000002.png", np.zeros((8, 8), np.uint8), "is 8x8 pixels, .*000001.png' 16x16"),
        ("train-all/0/000002.png", np.zeros((16, 16, 3), np.uint8), "has the mode 'RGB'"),
    ],
)
def test_wrong_images(tmp_path, name, image, expected):
    folder = write_version(tmp_path / "version")
    Image.fromarray(image).save(tmp_path / "version" / name)
    with pytest.raises(DataError, match=expected):
        PublishedCollages(folder).load()


def test_sets_of_different_sizes(tmp_path):
    folder = write_version(tmp_path / "version")
    for label in "01":
        for file in (tmp_path / "version" / "test-svhn" / label).iterdir():
            Image.fromarray(np.zeros((8, 8), np.uint8)).save(file)
    with pytest.raises(DataError, match=r"an example has the shape \[8, 8\], one of the training set \[16, 16\]"):
        PublishedCollages(folder).load()
