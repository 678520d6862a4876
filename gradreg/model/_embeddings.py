"""Where a model turns tokens into vectors."""

from __future__ import annotations

from torch import nn

from gradreg.errors import UnknownNameError, closest
from gradreg.model._walk import walk


def input_embeddings(model: nn.Module) -> dict[str, int]:
    """Return the modules that embed a model's inputs, each with how often a forward calls it.

    Models of transformers name them (`get_input_embeddings`), encoder-decoders one each for encoder and decoder, which may be
    one module called twice. Of any other model it is its only `nn.Embedding`.

    Raises:
        UnknownNameError: If there is none, or several of which none is the input's by name.
    """
    names = {id(module): name for name, module in walk(model)}
    found = [
        names.get(id(module)) for root in _roots(model) for module in map(_own, _sides(root)) if module is not None
    ]
    known = [name for name in found if name is not None]
    if known:
        return {name: known.count(name) for name in dict.fromkeys(known)}
    tables = [name for name, module in walk(model) if isinstance(module, nn.Embedding)]
    if len(tables) == 1:
        return {tables[0]: 1}
    has = f"several embeddings ({closest('embed', tables)})" if tables else "no nn.Embedding"
    raise UnknownNameError(
        f'{type(model).__name__} has {has} and does not say what embeds its inputs: name it, Embeddings("<module>").'
    )


def input_tables(model: nn.Module) -> list[nn.Module]:
    """Return the tables of a model that names them: one for its ids, or those of encoder and decoder; else nothing."""
    roots = _roots(model)
    if len(roots) != 1 or getattr(roots[0], "main_input_name", "input_ids") != "input_ids":
        return []
    tables = [_own(side) for side in _sides(roots[0])]
    return [table for table in tables if table is not None] if all(table is not None for table in tables) else []


def _roots(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that name their embedding: the model, or those that it wraps, as heads and bases do."""
    if hasattr(model, "get_input_embeddings"):
        return [model]
    return [root for child in model.children() for root in _roots(child)]


def _sides(root: nn.Module) -> list[nn.Module]:
    """Return encoder and decoder of a model that has both, else the model."""
    if not getattr(getattr(root, "config", None), "is_encoder_decoder", False):
        return [root]
    getters = ("get_encoder", "get_decoder")
    for _, module in walk(root):  # classifiers have no getters of their own in transformers 4
        if all(hasattr(module, getter) for getter in getters):
            return [getattr(module, getter)() for getter in getters]
    return [root]


def _own(side: nn.Module) -> nn.Module | None:
    """Return the embedding of a model, of an encoder or of a decoder."""
    getter = getattr(side, "get_input_embeddings", None)
    if getter is None:
        return None
    try:
        module = getter()
    except (NotImplementedError, AttributeError):
        return None
    return module if isinstance(module, nn.Module) else None
