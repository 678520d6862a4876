"""The closest match for options and keys that Hydra does not know; Hydra itself names none for lists and keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from gradreg.errors import closest

__all__ = ["override_hints"]


def override_hints(arguments: Sequence[str], config_name: str) -> list[str]:
    """Say what may have been meant by overrides that name no existing option or key.

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
            keys = _keys(config_name) if keys is None else keys
            if key not in keys:
                hints.append(f"The configuration has no {key!r}. Closest: {closest(key, [*keys, *groups])}.")
    return hints


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


def _keys(config_name: str) -> list[str]:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("gradreg.conf", version_base="1.3"):
        config = compose(config_name)
    return list(_flat(OmegaConf.to_container(config, resolve=True), ""))


def _flat(value: Any, prefix: str) -> Iterator[str]:
    for key, item in value.items():
        yield f"{prefix}{key}"
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
