"""Training gradients on disk, and exact queries over them."""

from gradreg.tracin.index._chosen import ChosenRows as ChosenRows
from gradreg.tracin.index._index import GradientIndex as GradientIndex
from gradreg.tracin.index._manifest import IndexMismatchError as IndexMismatchError
from gradreg.tracin.index._open import build_index as build_index
from gradreg.tracin.index._shards import DamagedIndexError as DamagedIndexError
from gradreg.tracin.index._verify import Verification as Verification
from gradreg.tracin.index._verify import spearman as spearman
