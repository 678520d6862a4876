"""`gradreg similarity`: why the gradients of two texts are as similar as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.experiments.attribution.program import run_job
from gradreg.experiments.environment import choose_device
from gradreg.experiments.files import write_json, write_text
from gradreg.experiments.transformers.load import DTYPES, HEADS, Loaded, folder_problem, load_model, model_problem
from gradreg.experiments.transformers.pairs import as_example, kind_of
from gradreg.experiments.transformers.sentences import OTHERS
from gradreg.experiments.transformers.small_t5 import train_t5

__all__ = ["main"]

SMALL_T5 = "t5"
_FILES = ("report.txt", "report.json", "report.safetensors", "similarity.html", "similarity.png", "config.yaml")


def _problems(config: Mapping[str, Any]) -> list[str]:
    problems = [problem] if (problem := folder_problem(config["out"])) else []
    if config["model"] != SMALL_T5:
        problem = model_problem(str(config["model"]), (SMALL_T5, "smollm2"))  # minilm has no loss of a text
        if problem:
            problems.append(problem)
    for key in ("a", "b", "input"):
        if not isinstance(config[key], str) or (key != "input" and not config[key]):
            number = (
                f"; a number that is meant as text has quotes: '{key}=\"{config[key]}\"'"
                if _is_number(config[key])
                else ""
            )
            problems.append(f"{key}: {config[key]!r} is not allowed; give a text, such as '{key}=\" pizza\"'{number}.")
    for key in ("end", "progress"):
        if not isinstance(config[key], bool):
            problems.append(f"{key}: {config[key]!r} is not allowed; allowed are true and false.")
    if config["input_b"] is not None and not isinstance(config["input_b"], str):
        problems.append(f"input_b: {config['input_b']!r} is not allowed; give a text, or null for the one of a.")
    for key, allowed in (("head", HEADS), ("dtype", DTYPES)):
        if config[key] not in allowed:
            problems.append(f"{key}: {config[key]!r} is not allowed; allowed are {', '.join(map(repr, allowed))}.")
    if not isinstance(config["steps"], int) or isinstance(config["steps"], bool) or config["steps"] < 0:
        problems.append(f"steps: {config['steps']!r} is not allowed; allowed are the integers 0, 1, 2, ...")
    share = config["stop_share"]
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1:
        problems.append(f"stop_share: {share!r} is not allowed; allowed are numbers from 0 to 1.")
    return [*problems, *_calibration_problems(config["calibration"])]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _calibration_problems(given: Any) -> list[str]:
    if given is None or given == "default":
        return []
    pairs = isinstance(given, list) and all(
        isinstance(one, list) and len(one) == 2 and all(isinstance(text, str) for text in one) for one in given
    )
    if pairs and given:
        return []
    return [
        f"calibration: {given!r} is not allowed; allowed are default, null, and a list of pairs [input, target], such as "
        "'[[She reads, books], [We drink, tea]]'."
    ]


def _loaded(config: Mapping[str, Any]) -> Loaded:
    if config["model"] == SMALL_T5:
        keys = ("steps", "seed", "stop_share", "progress")
        found = train_t5(**{key: config[key] for key in keys})
        found.model.to(choose_device(config["device"]), DTYPES[config["dtype"]])
        return found
    return load_model(
        str(config["model"]), head=config["head"], dtype=config["dtype"], device=choose_device(config["device"])
    )


def _work(config: dict[str, Any]) -> None:
    loaded = _loaded(config)
    kind_of(loaded)  # refuses models without a loss
    device = next(loaded.model.parameters()).device

    def example(text: str, target: str, where: str) -> gr.Batch:
        try:
            return gr.as_batch(as_example(loaded, text, target, end=config["end"])).to(device)
        except GradregError as problem:
            raise GradregError(f"{where}: {problem}") from problem

    second = config["input"] if config["input_b"] is None else config["input_b"]
    others = [example(text, target, f"calibration[{k}]") for k, (text, target) in enumerate(_others(config, loaded))]
    report = gr.explain_similarity(
        loaded.model,
        example(config["input"], config["a"], "a"),
        example(second, config["b"], "b"),
        params=tuple(config["params"]) if isinstance(config["params"], list) else config["params"],
        groups=config["groups"],
        tokenizer=loaded.tokenizer,
        calibration=others or None,
        memory=config["memory"],
    )
    pairs = [f"{config['input']!r} -> {config['a']!r}", f"{second!r} -> {config['b']!r}"]
    heading = [f"{side}: {pair}" for side, pair in zip("ab", pairs, strict=True)]
    text = "\n".join([*heading, "", str(report)])
    print(text)
    out = Path(config["out"])
    write_text(out / "report.txt", text + "\n")
    write_json(out / "report.json", {"input_a": config["input"], "input_b": second, **report.to_dict()})
    report.save(out / "report.safetensors")
    report.to_html(out / "similarity.html", examples=pairs)
    report.plot(out / "similarity.png", title="\n".join(heading))
    write_text(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
    print(f"\nWritten to {out}: {', '.join(_FILES)}")


def _others(config: Mapping[str, Any], loaded: Loaded) -> Sequence[tuple[str, str]]:
    given = config["calibration"]
    if given is None:
        return []
    if given != "default":
        return [(text, target) for text, target in given]
    if config["model"] == SMALL_T5:
        return OTHERS
    if gr.scalars.is_causal_language_model(loaded.model):
        return [(text, f" {target}") for text, target in OTHERS]
    return []  # of classifiers and masked models nobody knows classes and masks


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="similarity")
def main(config: DictConfig) -> float:
    """Explain a pair."""
    return run_job(config, _problems, _work)


if __name__ == "__main__":
    main()
