"""Shared bases of the experiments; each is made from the training set, without its labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.activations import activation_layer
from gradreg.experiments.data import Data

__all__ = ["Projected", "Standardized", "patch_components", "standardized", "trainable_layer", "whitened_components"]

_MOST = 10_000  # values per example whose covariance is decomposed: 0.8 GB, minutes


class Projected(nn.Module):
    """A frozen map `(flatten(x) - shift) @ matrix`, kept in buffers."""

    shift: Tensor
    matrix: Tensor

    def __init__(self, shift: Tensor, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.register_buffer("matrix", matrix)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[n, ...]` to `[n, d]`."""
        return (inputs.flatten(1) - self.shift) @ self.matrix


class Standardized(nn.Module):
    """A frozen map `(flatten(x) - shift) / scale`, kept in buffers."""

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.register_buffer("scale", scale)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[n, ...]` to `[n, d]`."""
        return (inputs.flatten(1) - self.shift) / self.scale


def whitened_components(data: Data, components: int = 48) -> nn.Module:
    """Project on the leading principal components of the whole input, each scaled to variance one.

    Args:
        data: The data; the training inputs are used.
        components: How many to keep at most; fewer where the inputs vary in fewer directions.

    Returns:
        A base without parameters.
    """
    flat = _flat(data)
    return Projected(flat.mean(0).float(), _whitening(flat - flat.mean(0), components).float())


def patch_components(
    data: Data, components: int = 48, height: int | None = None, width: int | None = None
) -> nn.Module:
    """Project every patch of the images on its own leading principal components, each scaled to variance one.

    Like the patch embedding of a vision transformer, with filters of its own at every place. Each feature then belongs to
    one place of the image, while components of the whole image mix the places.

    Args:
        data: The data; the training inputs are used, and where the parts lie.
        components: How many to keep at most, in all; patches have equal shares.
        height: Rows of a patch, or None: patches are the parts of the image; where these are unknown (or the inputs no
            images), the whole input is one patch.
        width: Columns of a patch, given together with `height`.

    Returns:
        A base without parameters.

    Raises:
        GradregError: If patches do not fill the images, or are more than components.
    """
    flat = _flat(data)
    patches = _patches(data, height, width)
    share = components // len(patches)
    if not share:
        raise gr.errors.GradregError(f"base.components is {components}, less than the {len(patches)} patches.")
    centered = flat - flat.mean(0)
    blocks = []
    for pixels in patches:
        own = _whitening(centered[:, pixels], share)
        block = torch.zeros(flat.shape[1], own.shape[1], dtype=own.dtype)
        block[pixels] = own
        blocks.append(block)
    return Projected(flat.mean(0).float(), torch.cat(blocks, 1).float())


def _patches(data: Data, height: int | None, width: int | None) -> list[Tensor]:
    """Return the numbers of the input values of each patch."""
    shape = data.train.inputs.shape[1:]
    numbered = torch.arange(shape.numel()).reshape(-1, *shape[-2:]) if len(shape) > 1 else torch.arange(shape.numel())
    if height is None and width is None:
        boxes = data.boxes.values()
        found = [numbered[:, top : top + rows, left : left + columns].flatten() for top, left, rows, columns in boxes]
        return found or [numbered.flatten()]
    if not height or not width or len(shape) < 2 or shape[-2] % height or shape[-1] % width:
        raise gr.errors.GradregError(
            f"Patches of {height}x{width} (base.height, base.width) do not fill inputs of the shape {list(shape)}. Give "
            "divisors of rows and columns, or null for both."
        )
    tiles = numbered.reshape(-1, shape[-2] // height, height, shape[-1] // width, width)
    return list(tiles.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1))


def standardized(data: Data) -> nn.Module:
    """Center every input value and scale all by one number, so that constant pixels stay harmless.

    Args:
        data: The data; the training inputs are used.

    Returns:
        A base without parameters.
    """
    flat = data.train.inputs.flatten(1)
    return Standardized(flat.mean(0), flat.std().clamp_min(1e-12))


def trainable_layer(
    data: Data, below: Callable[..., nn.Module] = standardized, width: int = 48, activation: str = "softplus"
) -> nn.Module:
    """Put one trainable layer on a frozen base.

    Args:
        data: The data; the training inputs are used.
        below: Makes the frozen base from `data`.
        width: Number of features.
        activation: Name of a torch.nn activation, such as `"softplus"`.

    Returns:
        A base with parameters.
    """
    frozen = below(data=data)
    with torch.no_grad():
        size = frozen.to(data.train.inputs.device)(data.train.inputs[:1]).shape[1]
    return nn.Sequential(frozen, nn.Linear(size, width), activation_layer(activation))


def _flat(data: Data) -> Tensor:
    flat = data.train.inputs.flatten(1).cpu().double()  # float64 does not exist on every device
    if flat.shape[1] > _MOST:
        raise gr.errors.GradregError(
            f"Principal components need a square matrix of the {flat.shape[1]} input values, which is too large beyond "
            f"{_MOST}. Make the inputs smaller, or use base=trainable."
        )
    return flat


def _whitening(centered: Tensor, components: int) -> Tensor:
    """Return the matrix from centered values to at most `components` uncorrelated ones of variance one."""
    variances, directions = torch.linalg.eigh(centered.T @ centered / len(centered))
    varying = int((variances > 1e-9 * variances[-1]).sum()) if variances[-1] > 0 else 0
    if not varying:
        raise gr.errors.GradregError(
            "The training inputs (or a patch of them) are the same in all examples: no component."
        )
    order = torch.arange(len(variances) - 1, len(variances) - 1 - min(components, varying), -1)
    return directions[:, order] / variances[order].sqrt()
