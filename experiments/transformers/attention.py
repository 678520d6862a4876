"""`gradreg attention`: attention and its gradients per layer, head and kind of token, as table, files and figure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

import gradreg as gr
from gradreg.errors import closest
from gradreg.experiments.attribution.program import run_job
from gradreg.experiments.environment import choose_device
from gradreg.experiments.files import write_json, write_text
from gradreg.experiments.transformers.load import DTYPES, HEADS, folder_problem, load_model, model_problem
from gradreg.experiments.transformers.objectives import OBJECTIVES, ask
from gradreg.experiments.transformers.texts import neighbors, read_lines

__all__ = ["main"]


def _problems(config: Mapping[str, Any]) -> list[str]:
    problems = [one for one in (model_problem(str(config["model"])), folder_problem(config["out"])) if one]
    for key, allowed in (("of", ["auto", *OBJECTIVES]), ("head", [*HEADS]), ("dtype", [*DTYPES])):
        if config[key] not in allowed:
            problems.append(f"{key}: {config[key]!r} is not allowed; closest: {closest(str(config[key]), allowed)}.")
    for key in ("count", "max_length", "chunk_size"):
        value = config[key]
        if value is None and key != "max_length":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{key}: {value!r} is not allowed; allowed are the integers 1, 2, 3, ...")
    if not isinstance(config["temperature"], float | int) or not config["temperature"] > 0:
        problems.append(f"temperature: {config['temperature']!r} is not allowed; allowed are positive numbers.")
    known = gr.attribution.attention.QUANTITIES
    for quantity in config["quantities"] or ["nothing"]:
        if quantity not in known:
            problems.append(f"quantities: {quantity!r} is not allowed; closest: {closest(str(quantity), known)}.")
    if config["text"] is not None and not Path(config["text"]).is_file():
        problems.append(f"text: {config['text']!r} is no file.")
    return problems


def _work(config: dict[str, Any]) -> None:
    started = time.perf_counter()
    loaded = load_model(
        str(config["model"]), head=config["head"], dtype=config["dtype"], device=choose_device(config["device"])
    )
    count = config["count"]
    texts = (
        [(one,) for one in neighbors(8 if count is None else count)]
        if config["text"] is None
        else read_lines(config["text"], count)
    )
    question = ask(loaded, config["of"], texts, config["max_length"], config["temperature"])
    read = time.perf_counter()
    layers = tuple(config["layers"]) if isinstance(config["layers"], list) else config["layers"]
    queries = config["queries"]
    report = gr.attention_report(
        loaded.model,
        question.batch,
        question.of,
        layers=layers,
        tokenizer=loaded.tokenizer,
        queries=queries,
        per=question.per,
        chunk_size=config["chunk_size"],
    )
    seconds = time.perf_counter() - read
    out = Path(config["out"])
    report.save(out / "attention.safetensors")
    write_json(out / "attention.json", {"config": config, "texts": question.texts, **report.to_dict()})
    write_text(out / "attention.txt", f"{report}\n")
    report.plot(out / "attention.png", quantities=tuple(config["quantities"]))
    report.to_html(out / "attention.html")
    print(report)
    print(f"\nLoaded in {read - started:.1f} s, report in {seconds:.1f} s")
    print(f"Written to {out}: attention.json, attention.safetensors, attention.txt, attention.png, attention.html")


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="attention")
def main(config: DictConfig) -> float:
    """Report the attention of a model."""
    return run_job(config, _problems, _work)


if __name__ == "__main__":
    main()
