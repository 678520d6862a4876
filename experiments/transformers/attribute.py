"""`gradreg attribute`: which tokens, or words, an output of a language model came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.experiments.attribution.program import run_job
from gradreg.experiments.environment import choose_device
from gradreg.experiments.files import write_json, write_text
from gradreg.experiments.transformers.attribute_output import as_json, as_rows, draw
from gradreg.experiments.transformers.chunks import points_at_a_time
from gradreg.experiments.transformers.goal_scalars import QUANTITIES
from gradreg.experiments.transformers.goals import Asked, asked, goal_of, unknown_goal
from gradreg.experiments.transformers.load import DTYPES, HEADS, Loaded, folder_problem, load_model, model_problem
from gradreg.tracin._memory import as_bytes

__all__ = ["main"]

_METHODS = ("integrated_gradients", "input_x_gradient", "saliency", "smooth_grad")
_BASELINES = ("auto", "pad", "mask", "mean")
_FILES = ("attribution.safetensors", "attribution.json", "attribution.html", "plots/", "config.yaml")


def _problems(config: Mapping[str, Any]) -> list[str]:
    places = (model_problem(str(config["model"])), folder_problem(config["out"]))
    problems = [one for one in places if one] + unknown_goal(config["goal"])
    choices = {"head": HEADS, "dtype": DTYPES, "quantity": QUANTITIES, "method": _METHODS}
    for key, allowed in choices.items():
        if config[key] not in allowed:
            problems.append(f"{key}: {config[key]!r} is not allowed; allowed are {', '.join(map(repr, allowed))}.")
    if config["baseline"] not in _BASELINES and not _count(config["baseline"], 0):
        problems.append(
            f"baseline: {config['baseline']!r} is not allowed; allowed are {', '.join(_BASELINES)} and token ids."
        )
    if config["n_steps"] != "auto" and not _count(config["n_steps"], 1):
        problems.append(
            f"n_steps: {config['n_steps']!r} is not allowed; allowed are auto and the integers 1, 2, 3, ..."
        )
    if config["keep_first"] not in ("auto", True, False):
        problems.append(f"keep_first: {config['keep_first']!r} is not allowed; allowed are auto, true and false.")
    for key in ("words", "progress"):
        if not isinstance(config[key], bool):
            problems.append(f"{key}: {config[key]!r} is not allowed; allowed are true and false.")
    for key in ("tolerance", "std"):
        if isinstance(config[key], bool) or not isinstance(config[key], (int, float)) or not config[key] > 0:
            problems.append(f"{key}: {config[key]!r} is not allowed; allowed are numbers above 0.")
    if not _count(config["k"], 1):
        problems.append(f"k: {config['k']!r} is not allowed; allowed are the integers 1, 2, 3, ...")
    try:
        as_bytes(config["memory"])
    except GradregError as problem:
        problems.append(f"memory: {problem}")
    texts, candidates = config["texts"], config["candidates"]
    if texts is not None and (not isinstance(texts, list) or not texts):
        problems.append(f"texts: {texts!r} is not allowed; give a list, such as 'texts=[\"A text.\"]'.")
    named = isinstance(candidates, list) and candidates and all(isinstance(one, str) for one in candidates)
    if not named and not _count(candidates, 1):
        problems.append(f"candidates: {candidates!r} is not allowed; allowed are integers from 1 and lists of texts.")
    return problems


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _work(config: dict[str, Any]) -> None:
    loaded = load_model(
        str(config["model"]), head=config["head"], dtype=config["dtype"], device=choose_device(config["device"])
    )
    goal = goal_of(loaded.model) if config["goal"] == "auto" else config["goal"]
    question = asked(loaded, goal, config["texts"], config["candidates"], config["quantity"])
    found = _attributed(config, loaded, question, goal)
    out = Path(config["out"])
    found.save(out / "attribution.safetensors")  # of tokens, from which words follow
    shown = _words(found, loaded, question) if config["words"] else found
    rows = as_rows(shown, question, loaded, config["k"])
    print("\n".join(rows.table))
    write_json(out / "attribution.json", as_json(shown, rows, loaded, goal))
    title = f"{loaded.name}: {found.method}, {goal}".replace("_", " ")
    shown.to_html(out / "attribution.html", title=title, examples=question.titles or None)
    draw(shown, question, out / "plots")
    write_text(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
    print(f"\nWritten to {out}: {', '.join(_FILES)}")


def _attributed(config: Mapping[str, Any], loaded: Loaded, question: Asked, goal: str) -> gr.Attribution:
    given: tuple[Any, ...] = (loaded.model, question.batch, question.of, gr.Embeddings())
    method = config["method"]
    points = points_at_a_time(loaded.model, question.batch, as_bytes(config["memory"]))
    if method == "integrated_gradients":
        found = gr.integrated_gradients(
            *given,
            baseline=_baseline(config, loaded, question, goal),
            n_steps=config["n_steps"],
            tolerance=config["tolerance"],
            chunk_size=points,
            show_progress=None if config["progress"] else False,
        )
    elif method == "smooth_grad":
        found = gr.smooth_grad(*given, std=config["std"], relative=True, chunk_size=points)
    else:
        found = getattr(gr, method)(*given, chunk_size=points)
    named = dataclasses.replace(
        found,
        target_axes=question.axes,
        target_labels=question.names,
        provenance={**found.provenance, "goal": goal, "model_name": loaded.name, "texts": question.texts},
    )
    return named.with_tokens(loaded.tokenizer)


def _baseline(config: Mapping[str, Any], loaded: Loaded, question: Asked, goal: str) -> Any:
    """Return the baseline; tokens that mark where texts begin and end stay in it, and so get no score."""
    name, tokenizer = config["baseline"], loaded.tokenizer
    pad, mask = tokenizer.pad_token_id, tokenizer.mask_token_id
    if name == "auto":
        # a token that also ends texts says something, and causal models were hardly ever trained on padding
        usable = pad is not None and pad != tokenizer.eos_token_id and goal != "next_token"
        name = "pad" if usable else "mean"
    chosen = None if name == "mean" else {"pad": pad, "mask": mask}.get(name, name)
    if chosen is None and name != "mean":
        raise GradregError(f"baseline: the tokenizer has no {name} token; use mean, or a token id.")
    if chosen is not None and chosen >= len(tokenizer):
        raise GradregError(f"baseline: {chosen} is no token id; allowed are 0 to {len(tokenizer) - 1}.")
    keep = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    keep = sorted(keep - {chosen})
    if config["keep_first"] if config["keep_first"] != "auto" else goal == "next_token":
        return _with_first(loaded.model, question.batch.named_inputs()["input_ids"], chosen, keep)
    return gr.mean_embedding() if chosen is None else gr.token_baseline(int(chosen), keep=keep)


def _with_first(model: Any, ids: Tensor, chosen: int | None, keep: list[int]) -> Tensor:
    """Return the vectors of a baseline in which every text keeps its first token."""
    embed = model.get_input_embeddings()
    with torch.no_grad():
        values = embed(ids)
        vocabulary = torch.arange(embed.weight.shape[0] if chosen is None else 1, device=ids.device)
        start = embed(vocabulary).mean(0) if chosen is None else embed(vocabulary + chosen)[0]
        stays = torch.isin(ids, torch.tensor(keep, dtype=ids.dtype, device=ids.device))
        stays[:, 0] = True
        return torch.where(stays.unsqueeze(-1), values, start)


def _words(found: gr.Attribution, loaded: Loaded, question: Asked) -> gr.Attribution:
    if not getattr(loaded.tokenizer, "is_fast", False):
        return found.words(loaded.tokenizer)
    texts = {key: question.texts[found.segments.get(key, "source")] for key in found.by_key}
    return found.words(loaded.tokenizer, texts=texts)


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="attribute")
def main(config: DictConfig) -> float:
    """Attribute."""
    return run_job(config, _problems, _work)


if __name__ == "__main__":
    main()
