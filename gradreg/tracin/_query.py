"""What is asked of a TracIn."""

from __future__ import annotations

from dataclasses import dataclass

from gradreg.errors import GradregError
from gradreg.tracin._spec import Spec

__all__ = ["Query", "make_query"]


@dataclass(frozen=True)
class Query:
    """What is asked: `per` None, "layer" or "token" (of `tokens` "train" or "test"), tests one by one or as one."""

    per: str | None = None
    tokens: str = "train"
    aggregate: bool = False

    def splits(self, side: str) -> bool:
        """Whether the rows of a side are tokens."""
        return self.per == "token" and self.tokens == side


def make_query(spec: Spec, per: str | None, tokens: str, aggregate: bool) -> Query:
    """Check what is asked against what the TracIn can give.

    Raises:
        GradregError: If an option has no such value, or has no meaning beside another.
    """
    if per not in (None, "layer", "token"):
        raise GradregError(f"per={per!r}; allowed are None, 'layer' and 'token'.")
    if tokens not in ("train", "test"):
        raise GradregError(f"tokens={tokens!r}; allowed are 'train' and 'test'.")
    query = Query(per, tokens, aggregate)
    if query.splits("test") and aggregate:
        raise GradregError("tokens='test' asks for the tokens of every test, aggregate=True takes the tests as one.")
    if query.splits("train") and spec.update == "optimizer":
        raise GradregError(
            "The step of an optimizer is no sum over tokens, so per='token' has no meaning for the training side with "
            "update='optimizer'; use tokens='test'."
        )
    if per == "layer" and spec.projection is not None:
        raise GradregError("A projection mixes the layers; with it, per='layer' is not possible.")
    return query
