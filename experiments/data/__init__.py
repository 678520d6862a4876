"""Where examples come from: one source per file, each a small class with `fingerprint()` and `load()`."""

from gradreg.experiments.data.digits import DigitCollages
from gradreg.experiments.data.published import PublishedCollages
from gradreg.experiments.data.splits import IN_DISTRIBUTION, Data
from gradreg.experiments.data.tensors import TensorFile

__all__ = ["IN_DISTRIBUTION", "Data", "DigitCollages", "PublishedCollages", "TensorFile"]
