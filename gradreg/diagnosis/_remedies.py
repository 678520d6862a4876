"""Remedies that are known to work, for what stands in the way of a second derivative."""

from __future__ import annotations

from gradreg.engine import LINEAR, PARTLY, PIECEWISE, RAISES, WRONG

SMOOTH = (
    "use a smooth activation there: nn.Softplus(beta=10), nn.GELU(), nn.SiLU(), nn.ELU() or nn.Tanh(); "
    "gradreg.smooth_activations(model) makes a copy with them."
)
LINEAR_PATH = (
    "the path is linear, so its gradient is a constant: put a smooth nonlinearity between (a hidden layer with nn.Softplus() "
    "or nn.GELU()), or differentiate a curved scalar such as gradreg.loss(F.cross_entropy)."
)
FREEZE = "If this part is meant to stay as it is, freeze it (requires_grad_(False))."

_POOLS = "use an average or nn.LPPool (norm 2), or a smooth maximum (torch.logsumexp)."
_ATTENTION = (
    "gradreg.gradients(..., differentiable=True) chooses the math kernel; in code of your own put "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the forward, or use need_weights=True (eager attention)."
)
_DISTANCE = "write the distance out: ((a - b) ** 2).sum(-1), with eps under a root."
_BAG = "index with nn.Embedding and sum."
_NORM = (
    "write the normalization out (mean, variance, rsqrt), as gradreg.gradients(..., differentiable=True) does; or nn.RMSNorm, "
    "nn.GroupNorm."
)
_WEIGHT_NORM = (
    "write it out, v * (g / v.norm()), as gradreg.gradients(..., differentiable=True) does: torch's kernel has a wrong second "
    "derivative with respect to v."
)
_BATCH_NORM = "put it in eval mode (module.eval()), or use nn.GroupNorm."

# By what a message of torch names, or the class or function, in lower case
_BY_NAME = (
    (
        "not finite at an input",
        "make the argument safe before the function (eps inside a root, a mask in front of it), not the result behind it.",
    ),
    ("flash_attention", _ATTENTION),
    ("scaled_dot_product", _ATTENTION),
    ("multiheadattention", _ATTENTION),
    ("multi_head_attention", _ATTENTION),
    ("hardsigmoid", "use torch.sigmoid (smooth); relu6(x + 3) / 6 is the same function, but piecewise linear."),
    ("embedding_bag", _BAG),
    ("embeddingbag", _BAG),
    ("max_norm", "renormalize the weight outside the forward."),
    ("cdist", _DISTANCE),
    ("pdist", _DISTANCE),
    ("ctc", "this loss has no second derivative; penalize logits instead of the loss."),
    ("multimargin", "use nn.CrossEntropyLoss or nn.MultiLabelSoftMarginLoss."),
    ("multi_margin", "use nn.CrossEntropyLoss or nn.MultiLabelSoftMarginLoss."),
    ("multilabelmargin", "use nn.MultiLabelSoftMarginLoss."),
    ("multilabel_margin", "use nn.MultiLabelSoftMarginLoss."),
    ("use_reentrant", "pass use_reentrant=False to torch.utils.checkpoint."),
    ("checkpointfunction", "pass use_reentrant=False to torch.utils.checkpoint."),
    ("cudnn_rnn", "put torch.backends.cudnn.flags(enabled=False) around the forward."),
    ("aot_autograd", "pass the uncompiled module (model._orig_mod)."),
    (
        "trying to backward through the graph a second time",
        "build task loss and penalty on one graph, with one final backward.",
    ),
    (
        "appears to not have been used in the graph",
        "differentiate with respect to the very tensor that the model goes on with, and slice the result (not the tensor); on a "
        "linear path the gradient is a constant.",
    ),
    ("modified by an inplace", "update out of place; backpropagate the penalty before any optimizer step."),
    ("batchnorm", _BATCH_NORM),
    ("weightnorm", _WEIGHT_NORM),
    ("weight_norm", _WEIGHT_NORM),
    ("layernorm", _NORM),
    ("layer_norm", _NORM),
    ("instancenorm", _NORM),
    ("instance_norm", _NORM),
)

_BY_CLASS = (
    ("pool", _POOLS),
    ("rnn", 'use nonlinearity="tanh", or a GRU or LSTM.'),
    (
        "softplus",
        "its second derivative is exactly 0 above threshold / beta: use a smaller beta or a larger threshold.",
    ),
)


def remedy(curvature: str, kind: str, text: str = "", custom: bool = False) -> str:
    """Return what helps.

    Args:
        curvature: The class that was measured.
        kind: The class of the module, or the name of the function.
        text: What torch said.
        custom: Whether it is, or contains, a custom autograd Function.

    Returns:
        A sentence.
    """
    found = f"{text} {kind}".lower()
    known = next((advice for key, advice in _BY_NAME if key in found), "")
    if curvature in (RAISES, WRONG) and known:
        return known
    if custom and curvature in (PIECEWISE, WRONG, RAISES):
        return (
            f"write the backward of {kind} in differentiable torch operations on saved inputs and outputs (no "
            "once_differentiable, numpy or saved intermediates), and test it with torch.autograd.gradgradcheck."
        )
    if curvature in (RAISES, WRONG):
        return "replace it by one with a second derivative, or write it out in elementary operations."
    if curvature in (PIECEWISE, PARTLY):
        return next((advice for key, advice in _BY_CLASS if key in kind.lower()), SMOOTH)
    return LINEAR_PATH if curvature == LINEAR else ""


def remedy_of_error(text: str) -> str:
    """Return what helps against an error that no operation could be named for; empty where the text says it itself."""
    lowered = text.lower()
    return next((advice for key, advice in _BY_NAME if key in lowered), "")
