"""TracIn: the influence of training examples on test examples, from inner products of gradients along a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor, nn

from gradreg.engine import Coverage
from gradreg.errors import GradregError
from gradreg.scalars import ScalarFunction
from gradreg.tracin._data import read_rows
from gradreg.tracin._diagnostics import CoverageReport, coverage_of, dominance
from gradreg.tracin._memory import Budget, as_bytes
from gradreg.tracin._passes import Passes, opened
from gradreg.tracin._projection import Projection
from gradreg.tracin._query import Query, make_query
from gradreg.tracin._ranking import Ranking, TopK, joined, rank, strongest, warn_if_dominated
from gradreg.tracin._reader import Reader
from gradreg.tracin._scores import TOTAL, pair_scores, self_scores
from gradreg.tracin._spec import make_spec
from gradreg.tracin.checkpoints import Checkpoint
from gradreg.wrt import Params

if TYPE_CHECKING:
    from gradreg.tracin.index import GradientIndex

__all__ = ["TracIn"]


class TracIn:
    r"""Influence of training examples $i$ on test examples $j$, over checkpoints $c$ with learning rates $\eta_c$.

    $$\mathrm{TracIn}(i, j) = \sum_c \eta_c \langle \nabla_\theta \ell_{test}(j; \theta_c),
    \nabla_\theta \ell(i; \theta_c) \rangle$$

    A positive score: a step of SGD on $i$ lowers the loss of $j$ (a proponent), by step size times score to first order.
    It is exact, over every trainable parameter, unless `params` selects fewer or a `projection` is asked for. Losses are
    per example and sums over an example's own axes; they are checked not to depend on batch size or padding.

    The model is evaluated in eval mode, with copies of its parameters; it is left exactly as it was. Each checkpoint is
    loaded once, test gradients are computed once per checkpoint and kept (in groups, if `memory` does not hold all), and
    training examples stream past them, so memory does not grow with their number.

    Training and test data may be: a tensor, a pair `(inputs, targets)`, a mapping with `labels`, a `Batch`; a map-style
    dataset or a list of rows, each a tensor, a pair or a mapping (as those of HF), padded on the right where lengths differ,
    labels with -100; several datasets, as a `ConcatDataset`, a list or a mapping; a `DataLoader`, of which the dataset and
    `collate_fn` are taken. Scores are in the order of the dataset, whatever a loader's `shuffle`, `drop_last` and batch size:
    column i is `dataset[i]`. Every reading of a row must give the same; random augmentations are noticed and refused.

    Args:
        model: Any module.
        of: The training loss: `gr.loss(fn)` or a function `(outputs, batch) -> [n]`. A loss function or module of torch is
            taken as `gr.loss` of it.
        checkpoints: `Checkpoint`s, state dicts with a key `"learning_rate"`, paths of files and folders (see
            `read_checkpoints`); one or a list.
        params: Globs of parameters, `"*"` for all trainable ones.
        test_of: The test loss, where it is another one.
        normalize: False; `"cosine"`, inner products over both norms, per checkpoint; `"relatif"`, scores over
            $\sqrt{\mathrm{TracIn}(i, i)}$.
        projection: A random projection of all gradients, from `gradreg.tracin`; None: exact.
        update: `"gradient"`, or `"optimizer"`: in place of the training gradient the direction that a step of the saved
            optimizer (Adam, AdamW or SGD) on this example alone would take, momentum and weight decay included.
        memory: About how many bytes to hold at a time, besides the model and the result: a number or a text (`"2 GiB"`).
        chunk_size: Examples at a time, in place of what `memory` gives. It changes no score.
        collate: From a list of rows of a dataset to a batch. None: that of the DataLoader; else stacking and right padding.
        show_progress: Show a progress bar, on terminals.

    Raises:
        CheckpointError: If a checkpoint cannot be read or has no learning rate.
        UnknownNameError: If `params` matches nothing.
        GradregError: If an option has no such value.

    References:
        Pruthi et al. 2020, "Estimating Training Data Influence by Tracing Gradient Descent", arXiv 2002.08484, equation 2
        (TracInCP). Barshan et al. 2020, "RelatIF", arXiv 2003.11630, equation 8. Xia et al. 2024, "LESS", arXiv 2402.04333,
        section 3 (directions of Adam).

    Example:
        >>> import torch, torch.nn.functional as F
        >>> import gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> train = (torch.randn(8, 3), torch.randint(0, 2, (8,)))
        >>> test = (torch.randn(4, 3), torch.randint(0, 2, (4,)))
        >>> tracin = gr.TracIn(net, gr.loss(F.cross_entropy), gr.Checkpoint(net.state_dict(), learning_rate=0.1))
        >>> tracin.influence(train, test).shape
        torch.Size([4, 8])
        >>> tracin.top_k(train, test, k=3).proponents.columns.shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        of: ScalarFunction,
        checkpoints: Any,
        *,
        params: str | Sequence[str] | Params | Sequence[Params] = "*",
        test_of: ScalarFunction | None = None,
        normalize: Literal[False, "cosine", "relatif"] = False,
        projection: Projection | None = None,
        update: Literal["gradient", "optimizer"] = "gradient",
        memory: int | str = "2 GiB",
        chunk_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        show_progress: bool = True,
    ) -> None:
        self.spec = make_spec(
            model,
            of,
            checkpoints,
            params=params,
            test_of=test_of,
            normalize=normalize,
            projection=projection,
            update=update,
            show_progress=show_progress,
        )
        if chunk_size is not None and (
            not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1
        ):
            raise GradregError(f"chunk_size={chunk_size!r}; allowed are None and integers from 1.")
        self.memory, self.chunk_size, self.collate = as_bytes(memory), chunk_size, collate
        self._rules: dict[str, Coverage] = {}

    def __repr__(self) -> str:
        options = [f"normalize={self.spec.normalize!r}"] if self.spec.normalize else []
        options += [f"update={self.spec.update!r}"] if self.spec.update != "gradient" else []
        options += [f"projection={self.spec.projection!r}"] if self.spec.projection is not None else []
        count, share = len(self.checkpoints), self.coverage.fraction
        text = ", ".join(["", *options])
        counted = f"{count} checkpoint{'' if count == 1 else 's'}"
        return f"TracIn({type(self.spec.model).__name__}, {counted}, {share:.1%} of the parameters{text})"

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints, with their learning rates."""
        return self.spec.checkpoints

    @property
    def coverage(self) -> CoverageReport:
        """Every parameter of the model, by which rule it takes part, or why it does not."""
        return coverage_of(self.spec.model, self.spec.selected, self._rules)

    @overload
    def influence(
        self, train: Any, test: Any, *, aggregate: bool = ..., per: Literal["token"] | None = ..., tokens: str = ...
    ) -> Tensor: ...
    @overload
    def influence(
        self, train: Any, test: Any, *, aggregate: bool = ..., per: Literal["layer"]
    ) -> dict[str, Tensor]: ...
    def influence(
        self, train: Any, test: Any, *, aggregate: bool = False, per: str | None = None, tokens: str = "train"
    ) -> Tensor | dict[str, Tensor]:
        """Return the scores of all pairs, `[tests, trains]`, in the order of the datasets.

        Args:
            train: Training examples, in any form named above.
            test: Test examples, likewise.
            aggregate: Take the tests as one, by the sum of their gradients: `[1, trains]`, in memory that does not depend on
                their number.
            per: `"layer"`: a dictionary from module name to `[tests, trains]`, which add up to the scores. `"token"`:
                `[tests, trains, tokens]`, which add up to the scores; the loss must have one value per token. With a shift,
                token t is the prediction of token t + 1; padding has 0.
            tokens: Whose tokens: `"train"` or `"test"`.

        Returns:
            Scores on the CPU, in float64 for a model in float64, else in float32.

        Raises:
            GradregError: If data, scalar, model and options do not fit; `NonFiniteLossError` names examples whose gradient
                is NaN or infinite.
        """
        query = make_query(self.spec, per, tokens, aggregate)
        with self._open(train, test) as (passes, trains, tests, budget):
            sink = pair_scores(self.spec, passes, trains, tests, range(len(tests)), query, budget)
        return sink.parts if per == "layer" else sink.parts[TOTAL]

    @overload
    def self_influence(self, train: Any, *, per: None = ...) -> Tensor: ...
    @overload
    def self_influence(self, train: Any, *, per: Literal["layer"]) -> dict[str, Tensor]: ...
    def self_influence(self, train: Any, *, per: str | None = None) -> Tensor | dict[str, Tensor]:
        r"""Return the score of every example with itself, $\sum_c \eta_c \lVert g_i \rVert^2$, `[trains]`; never normalized.

        Mislabeled and unusual examples have large ones. They are streamed: no pair is ever computed.

        Args:
            train: Training examples.
            per: None, or `"layer"`: a dictionary from module name to `[trains]`, which add up to the whole.
        """
        if per not in (None, "layer"):
            raise GradregError(f"per={per!r}; allowed are None and 'layer'.")
        with self._open(train) as (passes, trains, _, budget):
            sink = self_scores(self.spec, passes, trains, per, budget)
        parts = {key: part[0] for key, part in sink.parts.items()}
        return parts if per == "layer" else parts[TOTAL]

    @overload
    def top_k(self, train: Any, test: Any, k: int = ..., sign: None = ..., *, aggregate: bool = ...) -> TopK: ...
    @overload
    def top_k(self, train: Any, test: Any, k: int, sign: Literal[1, -1], *, aggregate: bool = ...) -> Ranking: ...
    def top_k(
        self, train: Any, test: Any, k: int = 10, sign: int | None = None, *, aggregate: bool = False
    ) -> TopK | Ranking:
        """Return the k strongest training examples of every test, with where they lie: `(dataset, row)`.

        The whole score matrix is never held beyond a share of `memory`: tests are taken in groups.

        Args:
            train: Training examples.
            test: Test examples.
            k: How many.
            sign: None: a `TopK` with `.proponents`, `.opponents` and `.dominance`. 1: the `Ranking` of the proponents alone;
                -1: that of the opponents.
            aggregate: Take the tests as one.

        Returns:
            A `TopK`, or a `Ranking` of `scores`, `columns` (both `[tests, k]`) and `rows`.

        Raises:
            GradregError: If k or sign is out of range.
        """
        if sign not in (None, 1, -1):
            raise GradregError(f"sign={sign!r}; allowed are None (both), 1 (proponents) and -1 (opponents).")
        with self._open(train, test) as (passes, trains, tests, budget):
            if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= len(trains):
                raise GradregError(f"k={k!r}; allowed are integers from 1 to the {len(trains)} training examples.")
            found: list[tuple[Ranking, Ranking]] = []
            step = len(tests) if aggregate else max(1, budget.results // (len(trains) * passes.dtype.itemsize))
            for start in range(0, len(tests), step):
                positions = range(start, min(start + step, len(tests)))
                query = Query(aggregate=aggregate)
                scores = pair_scores(self.spec, passes, trains, tests, positions, query, budget).parts[TOTAL]
                found.append((rank(scores, k, 1, trains.rows.identity), rank(scores, k, -1, trains.rows.identity)))
            proponents, opponents = joined([first for first, _ in found]), joined([last for _, last in found])
            top = TopK(proponents, opponents, dominance(strongest(proponents, opponents), len(trains)))
            warn_if_dominated(top.dominance, trains.name, self.spec.normalize == "cosine")
        return top if sign is None else top.proponents if sign == 1 else top.opponents

    def index(
        self,
        train: Any,
        path: str | Path,
        *,
        workers: int = 1,
        shard_rows: int | None = None,
        max_size: int | str = "20 GiB",
    ) -> GradientIndex:
        """Compute the training gradients once, store them, and return the index for queries.

        If the folder holds an unfinished index of the same model, checkpoints, data and settings, only what is missing or
        damaged is computed: after a kill at any point the files are, bit for bit, those of one uninterrupted run (on the
        same machine and versions), whatever the number of workers and the memory. Several programs may work on one folder at
        the same time, for example under torchrun; each returns when the index is complete.

        Args:
            train: Training examples.
            path: A folder for this index alone.
            workers: Processes on this machine, each on one thread.
            shard_rows: Examples per file; None: about 64 MiB. An unfinished index keeps its own.
            max_size: Refuse an index that would be larger: a number of bytes or a text.

        Returns:
            A `GradientIndex` with `top_k`, `influence`, `self_influence` and `verify`.

        Raises:
            GradregError: If the folder holds an index of something else (every difference is listed) or other files, or the
                index would be too large.
        """
        from gradreg.tracin.index import build_index

        return build_index(
            self.spec,
            train,
            path,
            memory=self.memory,
            chunk_size=self.chunk_size,
            collate=self.collate,
            workers=workers,
            shard_rows=shard_rows,
            max_size=max_size,
        )

    @contextmanager
    def _open(self, train: Any, test: Any = None) -> Iterator[tuple[Passes, Reader, Reader, Budget]]:
        train_rows = read_rows(train, self.collate)
        test_rows = train_rows if test is None else read_rows(test, self.collate)
        with opened(self.spec) as passes:
            trains, tests = Reader(train_rows, "train", passes.device), Reader(test_rows, "test", passes.device)
            yield passes, trains, tests, Budget(self.memory, self.chunk_size)
            self._rules = {item.name: item for item in passes.coverage}
