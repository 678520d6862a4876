"""The closest match for options and keys that Hydra does not know; Hydra itself names none for lists and keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

__all__ = ["null_lists", "override_hints"]


def null_lists(arguments: Sequence[str], config_name: str) -> list[str]:
    """Refuse `null` for groups of which several options can be chosen; Hydra stops there with a traceback.

    Args:
        arguments: The command line after the subcommand.
        config_name: The primary configuration, whose defaults say which groups take lists.

    Returns:
        One line per such override.
    """
    from omegaconf import OmegaConf

    primary: Any = OmegaConf.to_container(OmegaConf.load(str(resources.files("gradreg.conf") / f"{config_name}.yaml")))
    groups = [item for item in primary["defaults"] if isinstance(item, dict)]
    lists = {key for item in groups for key in item if isinstance(item[key], list)}
    given = [argument.partition("=")[::2] for argument in arguments]
    return [
        f"{key.strip()}: {value.strip() or 'nothing'} is not allowed; allowed is a list of options. For none of them give "
        f"'{key.strip()}=[]'."
        for key, value in given
        if key.strip() in lists and f"{key}={value}" in arguments and value.strip() in ("", "null")
    ]


def override_hints(arguments: Sequence[str], config_name: str) -> list[str]:
    """Say what may have been meant by overrides that name no existing option or key; call it when Hydra refused them.

    Args:
        arguments: The command line after the subcommand.
        config_name: The primary configuration, for its keys.

    Returns:
        One line per override that could not be matched; empty if none is suspicious.
    """
    given = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    groups = _groups([resources.files("gradreg.conf"), *_folders_of_user(arguments)])
    hints = []
    keys: list[str] | None = None
    for override in given:
        key, value = (part.strip() for part in override.split("=", 1))
        if key in groups:
            chosen = [part.strip(" '\"") for part in value.strip("[]").replace("[", "").replace("]", "").split(",")]
            for option in chosen:
                if option and option != "null" and option not in groups[key]:
                    hints.append(f"{key} has no {option!r}; there are {', '.join(sorted(groups[key]))}.")
        elif not key.startswith(("+", "~", "hydra")):
            keys = _keys(config_name, arguments, groups) if keys is None else keys
            if key not in keys:
                near = ", ".join(map(repr, _close(key, [*keys, *groups])))
                found = f"Closest: {near}." if near else "`--cfg job` shows all keys."
                hints.append(f"The configuration has no {key!r}. {found}")
    return list(dict.fromkeys(hints))


def _close(key: str, candidates: Iterable[str], most: int = 3) -> list[str]:
    """Return what was probably meant: names spelled alike, and the same last word elsewhere; maybe nothing."""
    pool = list(dict.fromkeys(candidates))
    alike = difflib.get_close_matches(key, pool, n=most, cutoff=0.8)
    last = key.rsplit(".", 1)[-1]
    elsewhere = sorted((name for name in pool if name.rsplit(".", 1)[-1] == last), key=len)
    return list(dict.fromkeys([*alike, *elsewhere]))[:most]


def _groups(roots: Iterable[Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for root in roots:
        for folder in root.iterdir() if root.is_dir() else ():
            if folder.is_dir():
                names = {file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")}
                if names:
                    found.setdefault(folder.name, set()).update(names)
    return found


def _folders_of_user(arguments: Sequence[str]) -> Iterator[Path]:
    for position, argument in enumerate(arguments):
        if argument.startswith("--config-dir="):
            yield Path(argument.split("=", 1)[1])
        elif argument in ("--config-dir", "-cd") and position + 1 < len(arguments):
            yield Path(arguments[position + 1])


def _keys(config_name: str, arguments: Sequence[str], groups: dict[str, set[str]]) -> list[str]:
    """Return the keys of the configuration with the chosen options; of the default ones if these do not compose."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    places = ",".join(f"file://{folder.resolve()}" for folder in _folders_of_user(arguments))
    chosen = [f"hydra.searchpath=[{places}]"] if places else []
    chosen += [argument for argument in arguments if argument.split("=", 1)[0].strip() in groups and "=" in argument]
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        try:
            config = compose(config_name, overrides=chosen)
        except Exception:  # Hydra raises more than its own; whatever it is was reported before
            config = compose(config_name)
    return list(_flat(OmegaConf.to_container(config, resolve=False), ""))


def _flat(value: Any, prefix: str) -> Iterator[str]:
    for key, item in value.items():
        yield f"{prefix}{key}"
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
