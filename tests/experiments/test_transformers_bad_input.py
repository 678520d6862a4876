"""What the commands on models of transformers cannot work with: told in one line, before work starts where that can be."""

from __future__ import annotations

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from gradreg.errors import GradregError
from gradreg.experiments.environment import choose_device

pytest.importorskip("transformers")

import transformers

from gradreg.experiments.transformers import attention, attribute, similarity
from gradreg.experiments.transformers.goals import asked
from gradreg.experiments.transformers.load import Loaded, load_model
from gradreg.experiments.transformers.objectives import ask
from tests.attribution.tokenizers_of_all_kinds import word_piece


def classifier(vocabulary, positions=16):
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=positions,
    )
    return transformers.BertForSequenceClassification(config).eval()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_files_that_were_not_written_to_their_end(tmp_path, name):
    tokenizer = word_piece()
    classifier(len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    load_model(str(tmp_path))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(GradregError, match=r"^model: .*(cannot be read|can be read)"):
        load_model(str(tmp_path))


def test_weights_of_torch_that_were_not_written_to_their_end(tmp_path):
    tokenizer = word_piece()
    classifier(len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"half")
    with pytest.raises(GradregError, match=r"^model: .*cannot be read"):
        load_model(str(tmp_path))


def test_a_tokenizer_of_another_model(tmp_path):
    loaded = Loaded("other", classifier(5), word_piece(), tmp_path)
    with pytest.raises(GradregError, match="The tokenizer does not belong to the model"):
        asked(loaded, "classes", ["pizza games"], 5, "logit")


def test_texts_are_cut_to_what_the_model_takes(tmp_path):
    tokenizer = word_piece()
    loaded = Loaded("short", classifier(len(tokenizer), positions=7), tokenizer, tmp_path)
    question = ask(loaded, "predicted_class", [("pizza games playing pizza games",)], 128, 0.05)
    assert question.batch.named_inputs()["input_ids"].shape[1] == 7
    with pytest.raises(GradregError, match="the model takes 1 to 7"):
        asked(loaded, "classes", ["pizza games playing pizza games"], 5, "logit")


@pytest.mark.parametrize("name", ["nowhere", "meta:x", "xpu:77"])
def test_devices_that_there_are_not(name):
    with pytest.raises(GradregError, match=f"device: '{name}' is not to be had"):
        choose_device(name)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "command"), [("attribute", attribute), ("attention", attention), ("similarity", similarity)]
)
def test_folders_of_results(name, command, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        config = OmegaConf.to_container(compose(name), resolve=True)
    for out in (None, "", 3, str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        assert any(problem.startswith("out: ") for problem in command._problems({**config, "out": out}))
    problems = command._problems({**config, "out": str(tmp_path / "new" / "below")})
    assert not any(problem.startswith("out: ") for problem in problems)
