"""data=collages_digits: what is predictive where."""

from __future__ import annotations

import torch

from gradreg.experiments.data import DigitCollages


def clean(**changes):
    settings = {"examples": 300, "validation_examples": 200, "test_examples": 200, "noise": (0, 0, 0, 0)}
    return DigitCollages(**{**settings, **changes})


def tile(batch, number):
    row, column = divmod(number, 2)
    return batch.inputs[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].flatten(1)


def agreement(batch, reference, number):
    """How often the nearest training tile has the label of the example."""
    nearest = torch.cdist(tile(batch, number), tile(reference, number)).argmin(1)
    return float((reference.targets[nearest] == batch.targets).double().mean())


def test_one_tile_alone_is_predictive_in_its_sets():
    data = clean().load()
    assert data.parts == ("0-1", "3-8", "4-9", "5-6")
    assert tuple(data.train.inputs.shape) == (300, 16, 16)
    for sets in (data.validation, data.test, data.upper_bounds):
        for position, part in enumerate(data.parts):
            for number in range(4):
                found = agreement(sets[part], data.train, number)
                assert found > 0.9 if number == position else 0.35 < found < 0.65
    assert all(agreement(data.test["id"], data.train, number) > 0.9 for number in range(4))


def test_source_images_are_disjoint():
    data = clean(contrast=(1, 1, 1, 1)).load()
    for number in range(4):
        seen = [
            {tuple(row) for row in tile(b, number).tolist()}
            for b in (data.train, data.validation["0-1"], data.test["0-1"])
        ]
        assert not seen[0] & seen[1]
        assert not seen[0] & seen[2]
        assert not seen[1] & seen[2]


def test_balanced_and_reproducible():
    first, again, other = clean(noise=(0.1,) * 4).load(), clean(noise=(0.1,) * 4).load(), clean(seed=1).load()
    assert int(first.train.targets.sum()) == 150
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert torch.equal(first.test["3-8"].inputs, again.test["3-8"].inputs)
    assert not torch.equal(first.train.targets, other.train.targets)


def test_number_of_tiles_is_free():
    data = DigitCollages(examples=4, pairs=[[1, 7]], contrast=[1.0], noise=[0.0], columns=1).load()
    assert tuple(data.train.inputs.shape) == (4, 8, 8)
