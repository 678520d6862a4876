"""Per-example parameter gradients from layer factors: the input of every layer and the gradient at its output."""

from gradreg.engine.factors._collect import collect as collect
from gradreg.engine.factors._factors import Coverage as Coverage
from gradreg.engine.factors._factors import Factors as Factors
