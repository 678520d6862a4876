"""After a call, everything is as before, also when the model or the scalar raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradreg.batch import Batch, map_tensors
from gradreg.engine import directional, gradients, plan
from gradreg.scalars import logit
from gradreg.testing import zoo
from gradreg.testing.compare import assert_same
from gradreg.wrt import Inputs, Outputs, Params, as_wrt

pytestmark = pytest.mark.filterwarnings("ignore::gradreg.errors.GradregWarning")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def tensors_of(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []
    for value in (batch.inputs, batch.targets, batch.groups, batch.extras):
        map_tensors(lambda tensor: (found.append(tensor), tensor)[1], value)
    return found


def observed(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Identity and value of all that a call must leave alone."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    tensors |= {f"batch {position}": tensor for position, tensor in enumerate(tensors_of(batch))}
    return {
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "storage": {name: tensor.data_ptr() for name, tensor in tensors.items()},
        "flags": {name: (tensor.requires_grad, tensor.is_leaf) for name, tensor in tensors.items()},
        "grad": {name: None if t.grad is None else id(t.grad) for name, t in tensors.items() if t.is_leaf},
        "types": {name: type(tensor) for name, tensor in tensors.items()},
        "train": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            f"{name}.{hooks}": list(getattr(module, hooks)) for name, module in model.named_modules() for hooks in HOOKS
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "flat": {
            name: [id(w) for w in m._flat_weights] for name, m in model.named_modules() if isinstance(m, nn.RNNBase)
        },
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()),
    }


@contextmanager
def nothing_changes(model: nn.Module, batch: Batch) -> Iterator[None]:
    before = observed(model, batch)
    values = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    rows = [tensor.detach().clone() for tensor in tensors_of(batch)]
    random_state = torch.get_rng_state()
    yield
    after = observed(model, batch)
    for what, found in after.items():
        assert found == before[what], what
    assert torch.equal(torch.get_rng_state(), random_state), "random state"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name]), name
    for position, (tensor, value) in enumerate(zip(tensors_of(batch), rows, strict=True)):
        assert torch.equal(tensor, value), f"tensor {position} of the batch"


CALLS: dict[str, Callable[..., Any]] = {
    "gradients": gradients,
    "differentiable": lambda *args: gradients(*args, differentiable=True),
    "loop": lambda *args: gradients(*args, route="loop"),
    "plan": plan,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.name)
def test_no_side_effects(case: zoo.Case, call: str) -> None:
    if call == "loop" and "batch_statistics" in case.tags:
        return
    model, batch = case.make_model(), case.make_batch()
    with nothing_changes(model, batch):
        for wrt in case.wrts.values():
            CALLS[call](model, batch, case.of, wrt)


@pytest.mark.parametrize(
    "name", ["mlp", "five_heads", "counting_buffer", "dropout_train", "gru_tuple", "in_place_first"]
)
def test_no_side_effects_of_directional(name: str) -> None:
    case = zoo.case(name)
    model, batch = case.make_model(), case.make_batch()
    directions = torch.randn_like(batch.inputs)[None]
    with nothing_changes(model, batch):
        directional(model, batch, case.of, Inputs(), directions)


@pytest.mark.parametrize("per", ["group", "batch"])
@pytest.mark.parametrize("name", ["counting_buffer", "dropout_train", "in_place_first", "five_heads"])
def test_no_side_effects_of_sums(name: str, per: str) -> None:
    case = zoo.case(name)
    model, batch = case.make_model(), case.make_batch()
    with nothing_changes(model, batch):
        gradients(model, batch, case.of, Params("*"), per=per)


def failing_of(outputs: Any, batch: Batch) -> Tensor:
    raise KeyError("broken scalar")


class _Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("broken layer")


ROUTES = [("inputs", "auto"), ("inputs", "loop"), ("params", "auto"), ("params", "loop"), ("activations", "auto")]


@pytest.mark.parametrize(("key", "route"), ROUTES)
@pytest.mark.parametrize("name", ["mlp", "counting_buffer", "five_heads", "batch_norm_eval"])
def test_no_side_effects_when_the_scalar_raises(name: str, key: str, route: str) -> None:
    case = zoo.case(name)
    model, batch = case.make_model(), case.make_batch()
    with nothing_changes(model, batch), pytest.raises(KeyError, match="broken scalar"):
        gradients(model, batch, failing_of, case.wrts[key], route=route)


@pytest.mark.parametrize(("key", "route"), ROUTES)
@pytest.mark.parametrize("name", ["mlp", "five_heads", "normalizations"])
def test_no_side_effects_when_the_model_raises(name: str, key: str, route: str) -> None:
    case = zoo.case(name)
    model, batch = case.make_model(), case.make_batch()
    last = model.heads[-1] if "heads" in case.tags else model
    last[-1] = _Broken()
    with nothing_changes(model, batch), pytest.raises(KeyError, match="broken layer"):
        gradients(model, batch, case.of, case.wrts[key], route=route, differentiable=True)


@pytest.mark.parametrize("wrt", [Inputs(), Params("*"), Outputs()], ids=["inputs", "params", "outputs"])
def test_existing_grad_is_left_alone(wrt: Any) -> None:
    case = zoo.case("mlp")
    model, batch = case.make_model(), case.make_batch()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with nothing_changes(model, batch):
        gradients(model, batch, case.of, wrt)
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())


def test_user_hooks_run_and_stay() -> None:
    case = zoo.case("mlp")
    model, batch = case.make_model(), case.make_batch()
    seen: list[int] = []
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    with nothing_changes(model, batch):
        gradients(model, batch, case.of, Inputs())
        seen.clear()  # the first call also looks at two examples
        gradients(model, batch, case.of, Inputs())
    assert seen == [1]
    handle.remove()


def test_a_differentiable_result_survives_a_later_forward() -> None:
    """Buffers are given back without touching what the graph saved."""
    case = zoo.case("counting_buffer")
    model, batch = case.make_model(), case.make_batch()
    found = gradients(model, batch, case.of, Inputs(), differentiable=True)["inputs"]
    model(batch.inputs)
    assert int(model.calls) == 1
    torch.autograd.grad(found.pow(2).sum(), list(model.parameters()), allow_unused=True)


def test_training_statistics_do_not_move() -> None:
    case = zoo.case("batch_norm_train_base")
    model, batch = case.make_model(), case.make_batch()
    with nothing_changes(model, batch):
        for wrt in case.wrts.values():
            gradients(model, batch, case.of, wrt, differentiable=True)


def test_memory_is_released() -> None:
    """No result, model or batch is kept alive by the engine."""
    import gc
    import weakref

    case = zoo.case("five_heads")
    model, batch = case.make_model(), case.make_batch()
    result = gradients(model, batch, case.of, (Inputs(), Params("*")), differentiable=True)
    watched = [weakref.ref(thing) for thing in (model, batch, *result.values(), *model.parameters())]
    del model, batch, result
    gc.collect()
    assert [reference for reference in watched if reference() is not None] == []


def test_dropout_masks_are_reproducible_and_differ_between_examples() -> None:
    case = zoo.case("dropout_train")
    model = case.make_model()
    same_input = torch.ones(6, 3, dtype=torch.float64)
    first, again = (gradients(model, same_input, logit(0), Params("0.bias"))["0.bias"] for _ in range(2))
    assert_same({"mask": first}, {"mask": again})
    zero = first == 0
    assert 0.3 < float(zero.double().mean()) < 0.7
    assert len({tuple(row.tolist()) for row in zero}) == 6
    torch.manual_seed(1)
    other = gradients(model, same_input, logit(0), Params("0.bias"))["0.bias"]
    assert not torch.equal(other == 0, zero)


def test_dropout_with_one_mask_for_all_and_with_none_allowed() -> None:
    case = zoo.case("dropout_train")
    model, same_input = case.make_model(), torch.ones(6, 3, dtype=torch.float64)
    options: dict[str, Any] = {"wrt": Params("0.bias"), "of": logit(0)}
    zero = gradients(model, same_input, randomness="same", **options)["0.bias"] == 0
    assert torch.equal(zero, zero[:1].expand_as(zero))
    assert zero.any()
    with pytest.raises(Exception, match="random"):
        gradients(model, same_input, randomness="error", route="vmap", **options)


def test_inputs_and_scalars_see_the_same_dropout_mask() -> None:
    """One forward serves all variables: what is dropped for the inputs is dropped for the activations."""
    case = zoo.case("dropout_train")
    found = gradients(case.make_model(), case.make_batch(), logit(0), (*as_wrt(Inputs()), *case_activations()))
    through_first = found["0"] @ case.make_model()[0].weight.detach()
    assert torch.allclose(found["inputs"], through_first, rtol=1e-10)


def case_activations() -> tuple[Any, ...]:
    from gradreg.wrt import Activations

    return (Activations("0"),)
