"""ContractivePenalty: by the formula, in Rifai's closed form, of a code among the outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.regularizers import ContractivePenalty
from tests.point_cases import Architecture
from tests.regularizers.naive import EVERY_ARCHITECTURE, case_of, random, same, slope


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("ContractivePenalty", architecture)
    rows = [slope(model, x, lambda z, c=c: z[c]).square().sum() for x in batch.inputs for c in range(3)]
    same(penalty(model, batch), sum(rows) / len(batch))


def test_a_sigmoid_layer_in_closed_form() -> None:
    layer, x = nn.Linear(4, 3).double(), random(5, 4)
    h = torch.sigmoid(layer(x))
    expected = ((h * (1 - h)).square() * layer.weight.square().sum(1)).sum(1).mean()
    same(ContractivePenalty()(nn.Sequential(layer, nn.Sigmoid()), x), expected.detach())


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
        self.decoder = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        code = self.encoder(x)
        return {"logits": self.decoder(code), "code": code}


def test_the_code_of_an_auto_encoder_beside_its_reconstruction() -> None:
    model, x = AutoEncoder().double(), random(5, 4)
    objective = gr.Objective(F.mse_loss, contraction=ContractivePenalty(output="code"))
    loss, logs = objective(model, (x, x))
    same(logs["contraction"], ContractivePenalty()(model.encoder, x).detach())
    same(logs["task"], F.mse_loss(model(x)["logits"], x).detach())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_projections_are_unbiased() -> None:
    encoder, x = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()).double(), random(1, 4).expand(20_000, 4)
    estimate = ContractivePenalty(projections=1)(encoder, x)
    torch.testing.assert_close(estimate, ContractivePenalty()(encoder, x[:1]), rtol=0.05, atol=0)
