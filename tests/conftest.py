from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
