"""Check a composed configuration before any work, and report everything that is wrong with it at once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from hydra.errors import CompactHydraException

import gradreg as gr
from gradreg.errors import closest
from gradreg.experiments._instantiate import build
from gradreg.experiments.locate import LocateError, locate
from gradreg.experiments.value_types import mismatch

__all__ = ["ConfigError", "check", "target_problems"]

_OWN_KEYS = {"_target_", "_partial_", "_args_", "_recursive_", "_convert_"}

_SUPPLIED = {  # what the program adds to a node with `_partial_: true`, by the last key of its path
    "base": {"data"},
    "below": {"data"},
    "heads": {"features", "classes"},
    "optimizer": {"params"},
    "learning_rate_schedule": {"optimizer"},
}

_CHEAP = re.compile(r"(arms\.[^.]+\.)?(data|proximal|regularizers\.[^.]+)|study")  # paths of what is built to check it


class ConfigError(gr.errors.GradregError, CompactHydraException):
    """A configuration with problems, all of them listed; as a compact one, Hydra shows it without a traceback."""


def check(config: Mapping[str, Any], rules: Callable[[Mapping[str, Any]], list[str]]) -> dict[str, Any]:
    """Refuse a wrong configuration.

    Args:
        config: The composed configuration, resolved, as plain containers.
        rules: Gives the problems with plain values, such as a negative number of steps.

    Returns:
        What was built on the way because building it is the check: `"data"`, the source (nothing is loaded), or `"study"`.

    Raises:
        ConfigError: If there is any problem; names the config path and the closest match of each.
    """
    problems = [*missing_values(config), *target_problems(config), *rules(config)]
    # Objects check their own values. Build those that cost nothing, unless their node is known to be wrong already.
    built: dict[str, Any] = {}
    for path, node in _walk(config):
        if not _CHEAP.fullmatch(path) or not isinstance(node, Mapping) or any(p.startswith(path) for p in problems):
            continue
        try:
            built[path] = build(node)
        except Exception as error:  # constructors of users may raise anything; it is reported with the others
            cause = error.__cause__ or error  # Hydra wraps what the constructor raised
            problems.append(f"{path}: {cause}")
    problems += _optimizer_problems(config, problems)
    problems += _nothing_to_train(config, built.get("data"))
    problems = _distinct(problems)
    if problems:
        listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"The configuration has {count}; nothing was started.\n{listed}")
    return built


def _optimizer_problems(config: Mapping[str, Any], known: list[str]) -> list[str]:
    """Build optimizer and schedule over a parameter of no consequence, for they check their own values."""
    supplied: dict[str, Any] = {"params": [torch.nn.Parameter(torch.zeros(2, 2))]}
    for path, argument in (("optimizer", "optimizer"), ("learning_rate_schedule", "")):
        node = config.get(path)
        if not isinstance(node, Mapping) or any(problem.startswith(path) for problem in known):
            return []
        try:
            supplied = {argument: build(node, **supplied)}
        except Exception as error:  # see check
            return [f"{path}: {error.__cause__ or error}"]
    return []


def _nothing_to_train(config: Mapping[str, Any], source: Any) -> list[str]:
    """Refuse a run of upper bounds alone on data that bring no training sets for them."""
    has_upper_bounds = getattr(source, "has_upper_bounds", None)  # other sources always have them
    if config.get("arms") or not config.get("upper_bound") or has_upper_bounds is None or has_upper_bounds():
        return []
    return [
        "arms: nothing to train; no arm is selected and the data bring no training set for an upper bound. Select at least "
        "one arm, such as arms=[penalty]."
    ]


def _distinct(problems: list[str]) -> list[str]:
    """Keep the first problem of each path, and leave out what an arm only takes over from the top level."""
    by_path: dict[str, str] = {}
    for problem in problems:
        path, message = problem.split(":", 1)
        by_path.setdefault(path, message)
    owned = re.compile(r"(arms\.[^.]+|upper_bound)\.")
    top = {(path.rsplit(".", 1)[-1], message) for path, message in by_path.items() if not owned.match(path)}
    return [
        f"{path}:{message}"
        for path, message in by_path.items()
        if not owned.match(path) or (path.rsplit(".", 1)[-1], message) not in top
    ]


def missing_values(config: Mapping[str, Any]) -> list[str]:
    """List the mandatory values (`???`) that were not given."""
    return [f"{path}: a value is required; give {path}=..." for path, value in _walk(config) if value == "???"]


def target_problems(config: Mapping[str, Any]) -> list[str]:
    """Check every node that has a `_target_`: it exists, is allowed, and takes the given arguments."""
    extra = tuple(config.get("allow_targets") or ())
    problems = []
    for path, node in _walk(config):
        if not isinstance(node, Mapping) or "_target_" not in node:
            continue
        try:
            target = locate(str(node["_target_"]), extra)
        except LocateError as error:
            problems.append(f"{path}._target_: {error}")
            continue
        problems += _argument_problems(path, node, target)
    return problems


def _argument_problems(path: str, node: Mapping[str, Any], target: Callable[..., Any]) -> list[str]:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some builtins have none
        return []
    name, parameters = str(node["_target_"]), signature.parameters
    named = {key: item for key, item in parameters.items() if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)}
    open_ended = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    given = [str(key) for key in node if key not in _OWN_KEYS]
    problems = [
        f"{path}.{key}: {name} takes no argument {key!r}. Closest: {closest(key, named)}."
        for key in given
        if key not in named and not open_ended
    ]
    for key in given:
        reason = mismatch(node[key], key, target) if key in named else None
        if reason:
            problems.append(f"{path}.{key}: {reason}")
    role = path.rsplit(".", 1)[-1]
    partial = bool(node.get("_partial_"))
    if partial and role not in _SUPPLIED:
        return problems  # completed by the user's own object, which knows what is missing
    supplied = _SUPPLIED[role] if partial else set()
    positional = len(node.get("_args_", ()))
    required = [key for key, item in list(named.items())[positional:] if item.default is item.empty]
    problems += [
        f"{path}.{key}: {name} requires the argument {key!r}."
        for key in required
        if key not in given and key not in supplied
    ]
    if partial and not open_ended:
        problems += [
            f"{path}: {name} cannot stand here, for it takes no argument {key!r}, which is passed to every {role}."
            for key in sorted(supplied - set(named))
        ]
    return problems


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if path:
        yield path, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _walk(item, f"{path}.{key}" if path else str(key))
