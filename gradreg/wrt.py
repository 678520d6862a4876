"""What is differentiated with respect to: plain descriptions, resolved by the engine.

In globs `*` stays within a dotted segment, `**` crosses segments, and a lone `"*"` means everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gradreg.errors import GradregError, UnknownNameError, closest

__all__ = [
    "Activations",
    "AttentionMaps",
    "Embeddings",
    "Features",
    "Inputs",
    "Outputs",
    "Params",
    "Wrt",
    "as_wrt",
    "match_names",
]


@dataclass(frozen=True)
class Inputs:
    """The model's inputs; `name=None` takes every floating-point input.

    Result key: `"inputs"` for a batch of one tensor, else the name of the input.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Bilinear(3, 4, 2)
        >>> batch = gr.Batch((torch.zeros(5, 3), torch.zeros(5, 4)))
        >>> {name: tuple(g.shape) for name, g in gr.gradients(net, batch, gr.logit(0), gr.Inputs()).items()}
        {'0': (5, 3), '1': (5, 4)}
    """

    name: str | None = None


@dataclass(frozen=True)
class Features:
    """The output of the base of a `SharedBase`, as every head sees it. Result key: `"features"`.

    Example:
        >>> import torch, gradreg as gr
        >>> model = gr.SharedBase(torch.nn.Linear(3, 4), [torch.nn.Linear(4, 2) for _ in range(6)])
        >>> gr.gradients(model, torch.zeros(5, 3), gr.logit(0), gr.Features())["features"].shape
        torch.Size([5, 6, 4])
    """


@dataclass(frozen=True)
class Outputs:
    """The outputs that `of` is given: logits of one head, or of a model without heads. Result key: `"outputs"`.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.gradients(torch.nn.Linear(3, 2), torch.zeros(1, 3), gr.logit(1), gr.Outputs())["outputs"]
        tensor([[0., 1.]])
    """


@dataclass(frozen=True)
class Activations:
    """The outputs of the modules whose names match a glob.

    Where a module returns several tensors, the first is taken. The result is keyed by the module's name, and by
    `name#k` for the k-th call (counted from 0) of a module that is called several times in one forward.

    Args:
        glob: Module names, for example `"encoder.layer.*"`; `"name#1"` picks one call. `*` stays within a dotted segment, `**`
            crosses segments, and a lone `"*"` means everything.
        batch_axis: The axis of the module's output that runs over examples. Results always have the example first.

    Example:
        >>> import torch, gradreg as gr
        >>> layer = torch.nn.Linear(3, 3)
        >>> net = torch.nn.Sequential(layer, torch.nn.Tanh(), layer)
        >>> list(gr.gradients(net, torch.zeros(5, 3), gr.logit(0), gr.Activations("*")))
        ['0#0', '1', '0#1']
    """

    glob: str
    batch_axis: int = 0

    def __post_init__(self) -> None:
        _check_glob(self, self.glob)


@dataclass(frozen=True)
class Embeddings:
    """The vectors that a model makes of its tokens; the token ids are passed to it as usual.

    What `model.get_input_embeddings()` of transformers returns, for encoder-decoder models of the encoder and of the
    decoder; of another model its only `nn.Embedding`. Result keys are the names of these modules, with `#0` for the encoder
    and `#1` for the decoder where both share one module object. Left-padded batches of models with learned positions get
    their `position_ids` from the attention mask.

    Args:
        glob: Names of embedding modules, where another one is meant, such as `"**.position_embeddings"`.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Embedding(9, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> ids = torch.tensor([[1, 5, 0, 8]])
        >>> {name: tuple(g.shape) for name, g in gr.gradients(net, ids, gr.all_logits(), gr.Embeddings()).items()}
        {'0': (1, 2, 4, 3)}
    """

    glob: str | None = None

    def __post_init__(self) -> None:
        if self.glob is not None:
            _check_glob(self, self.glob)


@dataclass(frozen=True)
class AttentionMaps:
    """The attention weights behind the softmax and before dropout, `[n, heads, queries, keys]`.

    They are reached under any attention implementation that calls `scaled_dot_product_attention`, and where a model writes
    its softmax out itself; the calls are counted and the outputs compared at the first time. Result keys are
    `"<module>:attention"`, with `#k` for the k-th call of a module that layers share; self and cross attention are modules of
    their own. Weights of masked keys are zero, but their gradients are not: they tell what would be if the key were seen.

    Args:
        layers: None for all; a layer or several, by the first number in the module's name, counted from 0 (of encoder and
            decoder alike); or a glob of module names.

    Example:
        >>> import torch, gradreg as gr
        >>> layer = torch.nn.TransformerEncoderLayer(4, nhead=2, dim_feedforward=8, batch_first=True, dropout=0.0)
        >>> net = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> {name: tuple(g.shape) for name, g in gr.gradients(net, torch.zeros(5, 3, 4), gr.logit(0), gr.AttentionMaps()).items()}
        {'0.self_attn:attention': (5, 2, 3, 3)}
    """

    layers: int | tuple[int, ...] | str | None = None

    def __post_init__(self) -> None:
        given: object = self.layers
        if isinstance(given, list):
            object.__setattr__(self, "layers", tuple(given))  # frozen for others
        layers = given if isinstance(given, (tuple, list)) else (given,)
        whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
        if not (whole or self.layers is None or isinstance(self.layers, str)):
            raise GradregError(
                f"{self!r}; allowed are the number of a layer, a tuple of numbers, a glob of module names, and None for all."
            )


@dataclass(frozen=True)
class Params:
    """The trainable parameters whose names match a glob; frozen ones are left out.

    In globs `*` stays within a dotted segment, `**` crosses segments, and a lone `"*"` means everything: `"head.*.weight"`,
    `"**.weight"`, `"*"`. A tied parameter is known by its first name and may be selected by any of its names.

    Args:
        glob: Names of parameters.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> {name: tuple(g.shape) for name, g in gr.gradients(net, torch.zeros(5, 3), gr.logit(0), gr.Params("2.*")).items()}
        {'2.weight': (5, 2, 4), '2.bias': (5, 2)}
    """

    glob: str = "*"

    def __post_init__(self) -> None:
        _check_glob(self, self.glob)


def _check_glob(item: object, glob: object) -> None:
    if not isinstance(glob, str):
        raise GradregError(f"{item!r}; a glob is a text, such as 'encoder.layer.*'.")


Wrt = Inputs | Features | Outputs | Activations | Embeddings | AttentionMaps | Params


def as_wrt(wrt: object) -> tuple[Wrt, ...]:
    """Return a tuple of descriptions from one description or a tuple of them.

    Raises:
        GradregError: If something else is found.
    """
    items = tuple(wrt) if isinstance(wrt, (tuple, list)) else (wrt,)
    if not items:
        raise GradregError(
            "wrt is empty: name at least one of Inputs(), Features(), Outputs(), Activations(), Embeddings(), AttentionMaps(), "
            "Params()."
        )
    for item in items:
        if not isinstance(item, Wrt):
            hint = f" Did you mean {item.__name__}()?" if isinstance(item, type) else ""
            raise GradregError(
                f"wrt holds {item!r}; allowed are Inputs(name), Features(), Outputs(), Activations(glob), Embeddings(), "
                f"AttentionMaps(layers), Params(glob) and tuples of them.{hint}"
            )
    return items


def compile_glob(glob: str) -> re.Pattern[str]:
    """Translate a glob over dotted names into a regular expression.

    Example:
        >>> from gradreg.wrt import compile_glob
        >>> [compile_glob(glob).fullmatch("head.0.weight") is not None for glob in ("head.*", "head.**", "*")]
        [False, True, True]
    """
    if glob == "*":
        glob = "**"
    pattern = ""
    for part in re.split(r"(\*\*\.|\*\*|\*|\?)", glob):
        # "**." also matches nothing, so that "**.weight" finds a parameter of the root module
        pattern += {"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": "[^.]"}.get(part, re.escape(part))
    return re.compile(pattern)


def match_names(glob: str, names: Iterable[str], what: str) -> list[str]:
    """Return the names that match, in their order.

    Raises:
        UnknownNameError: If none does; the closest names are listed.
    """
    pool = list(names)
    pattern = compile_glob(glob)
    found = [name for name in pool if pattern.fullmatch(name)]
    if not found:
        crossing = ""
        if "*" in glob and "**" not in glob:
            wider = "**" + glob.lstrip("*") if glob.startswith("*") else glob.replace("*", "**")
            fits = any(compile_glob(wider).fullmatch(name) for name in pool)
            crossing = " In globs * stays within a dotted segment; ** crosses" + (
                f": {wider!r} matches." if fits else "."
            )
        raise UnknownNameError(f"No {what} matches {glob!r}; the closest are {closest(glob, pool)}.{crossing}")
    return found
