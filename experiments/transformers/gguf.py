"""Quantized weights (GGUF), unpacked once into an ordinary folder of transformers: 12 s the first time, then a third of one."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["cache_folder", "unpacked"]


def cache_folder() -> Path:
    """Return where unpacked models are kept: `GRADREG_CACHE`, else the user's cache folder."""
    given = os.environ.get("GRADREG_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradreg"


def unpacked(file: Path, name: str) -> Path:
    """Return a folder with the de-quantized float32 weights and the tokenizer of a GGUF file, made where it is missing.

    The folder's name carries a hash of the file and the generation of transformers, whose tokenizers older ones cannot read.

    Args:
        file: A GGUF file that transformers can read.
        name: For the folder.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:12]
    generation = metadata.version("transformers").partition(".")[0]
    folder = cache_folder() / f"{name}-{digest}-transformers-{generation}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        _unpack(file, made)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process was faster, or the disk has a fault
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _unpack(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    # the weights are ordinary ones by now, but transformers still refuses to save what was read from a quantized file
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    if model.config.eos_token_id is not None:  # transformers 4 gives the tokenizer another one than the file says
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    begins = _says(file, "tokenizer.ggml.add_bos_token")
    if begins is not None and getattr(tokenizer, "add_bos_token", begins) != begins:  # so does transformers 4 here
        tokenizer.add_bos_token = begins
    tokenizer.save_pretrained(folder)


def _says(file: Path, key: str) -> Any:
    """Return what a GGUF file says under a key; None if it says nothing."""
    import gguf

    field = gguf.GGUFReader(file).fields.get(key)
    return None if field is None else field.contents()
