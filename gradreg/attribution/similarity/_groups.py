"""Which group every parameter belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from gradreg.errors import GradregError
from gradreg.model import parameter_aliases, walk
from gradreg.wrt import match_names

Groups: TypeAlias = str | Mapping[str, str | Sequence[str]] | Callable[[str], str]

EMBEDDINGS, NORMS, ATTENTION, MLP, HEAD, OTHER = "embeddings", "norms", "attention", "mlp", "head", "other"

AUTO = (
    "auto: embeddings with the output head that is tied to them, norms, output head, and per stack of layers, in up to three "
    "ranges, attention, cross-attention and MLP; elsewhere one group per module"
)
_REST = "the rest"
_RANGES = 3

# a layer of a stack: something before its number, a module behind
_LAYER = re.compile(r"(?P<stack>.+?)\.(?P<number>\d+)\.(?P<inside>.+)\.[^.]+")


@dataclass(frozen=True)
class Place:
    """Where a parameter belongs.

    Attributes:
        group: For the table.
        kind: What it is, for what-ifs.
    """

    group: str
    kind: str


def places(model: nn.Module, names: Sequence[str], groups: Groups) -> tuple[dict[str, Place], str]:
    """Return the place of every parameter, and the rule in words.

    Args:
        model: The model, unwrapped.
        names: First names of the parameters.
        groups: `"auto"`, a mapping from group to globs, or a function from name to group.

    Raises:
        GradregError: If it is none of these, a glob matches nothing, or the function gives no text.
    """
    own = _own_places(model, names)
    if isinstance(groups, str):
        if groups != "auto":
            raise GradregError(
                f'groups={groups!r}; allowed are "auto", a mapping such as {{"mlp": "**.mlp.**"}} and a function from the name '
                "of a parameter to its group."
            )
        return own, AUTO
    if isinstance(groups, Mapping):
        chosen = _by_globs(model, names, groups)
        rule = "; ".join(f"{group}: {globs}" for group, globs in groups.items())
    elif callable(groups):
        chosen, rule = {name: groups(name) for name in names}, f"function {getattr(groups, '__name__', repr(groups))}"
    else:
        raise GradregError(f'groups is a {type(groups).__name__}; allowed are "auto", a mapping and a function.')
    for name, group in chosen.items():
        if not isinstance(group, str) or not group:
            raise GradregError(f"groups({name!r}) gave {group!r}; it must give the name of a group, a text.")
    return {name: Place(chosen[name], own[name].kind) for name in names}, rule


def _by_globs(model: nn.Module, names: Sequence[str], groups: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
    aliases = parameter_aliases(model)
    chosen: dict[str, str] = {}
    for group, globs in groups.items():
        own = [globs] if isinstance(globs, str) else globs
        if not isinstance(own, Sequence) or not all(isinstance(glob, str) for glob in own):
            raise GradregError(
                f"groups[{group!r}] is {globs!r}; allowed are a glob such as '**.mlp.**' and a list of globs."
            )
        for glob in own:
            for found in match_names(glob, aliases, f"parameter (groups[{group!r}])"):
                chosen.setdefault(aliases[found], str(group))
    return {name: chosen.get(name, _REST) for name in names}


def _own_places(model: nn.Module, names: Sequence[str]) -> dict[str, Place]:
    modules = dict(walk(model))
    layers = {name: found for name in parameter_aliases(model) if (found := _LAYER.fullmatch(name))}
    stacks: dict[str, int] = {}
    for found in layers.values():
        stacks[found["stack"]] = max(stacks.get(found["stack"], 0), int(found["number"]) + 1)
    head, head_name = _output_head(model)
    tied = set() if head is None else {id(own) for own in head.parameters()}
    base = getattr(model, "base_model_prefix", "")
    placed: dict[str, Place] = {}
    parameters = dict(model.named_parameters())
    for name in names:
        path = name.rpartition(".")[0]
        module, layer = modules[path], layers.get(name)
        attention = layer is not None and re.search("att", layer["inside"], re.IGNORECASE) is not None
        if isinstance(module, nn.Embedding) and not attention:  # T5's table of position biases belongs to its attention
            shared = id(parameters[name]) in tied
            placed[name] = Place(f"embeddings (tied to {head_name})" if shared else "embeddings", EMBEDDINGS)
        elif id(parameters[name]) in tied:
            placed[name] = Place(f"output head ({head_name})", EMBEDDINGS)
        elif re.search("norm", type(module).__name__, re.IGNORECASE):
            placed[name] = Place("norms", NORMS)
        elif layer is not None:
            placed[name] = _in_layer(layer, attention, stacks)
        else:
            outside = bool(base) and hasattr(model, base) and not name.startswith(f"{base}.")
            group = f"{path} ({type(module).__name__})" if path else name
            placed[name] = Place(group, HEAD if outside else OTHER)
    return placed


def _in_layer(layer: re.Match[str], attention: bool, stacks: Mapping[str, int]) -> Place:
    cross = re.search(r"cross|encdec|encoder_att", layer["inside"], re.IGNORECASE) is not None
    part = ("cross-attention" if cross else "attention") if attention else "MLP"
    stack, number = layer["stack"], int(layer["number"])
    size = stacks[stack]
    count = min(_RANGES, size)
    start, stop = next(
        (k * size // count, (k + 1) * size // count) for k in range(count) if number < (k + 1) * size // count
    )
    which = f"layer {start}" if stop - start == 1 else f"layers {start}-{stop - 1}"
    words = [word for word in ("encoder", "decoder") if word in stack.split(".")]
    label = words[0] if words else stack if len(stacks) > 1 else ""
    return Place(f"{label} {which} {part}".strip(), ATTENTION if attention else MLP)


def _output_head(model: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the module that gives logits over the vocabulary, and its name."""
    try:
        head = getattr(model, "get_output_embeddings", lambda: None)()
    except (NotImplementedError, AttributeError):  # a model without one
        head = None
    if not isinstance(head, nn.Module):
        return None, ""
    return head, next((name for name, module in model.named_modules() if module is head), type(head).__name__)
