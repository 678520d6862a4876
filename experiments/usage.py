"""The help of commands whose options are all in one file: its own comments say what each of them is."""

from __future__ import annotations

from importlib import resources
from typing import Any

__all__ = ["usage"]


def usage(config_name: str) -> str | None:
    """Return what `--help` prints: the header of the configuration, and its options with their comments.

    Hydra's own help names the groups of all other commands, and leaves comments out.

    Args:
        config_name: The primary configuration.

    Returns:
        The text; None where other files take part in the configuration, which Hydra composes.
    """
    from omegaconf import OmegaConf

    text = (resources.files("gradreg.conf") / f"{config_name}.yaml").read_text(encoding="utf-8")
    config: Any = OmegaConf.create(text)
    if any(item != "_self_" and "override hydra/job_logging" not in item for item in config.defaults):
        return None
    options = text[text.index("\n\n") : text.index("\nhydra:\n")].strip()
    heading = "Options, as OPTION=VALUE, with what they are if nothing is given:"
    return f"{config.hydra.help.header.strip()}\n\n{heading}\n\n{options}\n"
