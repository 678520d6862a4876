"""Per-example parameter gradients, kept as factors of layers."""

from gradreg.engine.factors._collect import collect_factors as collect_factors
from gradreg.engine.factors._factors import Coverage as Coverage
from gradreg.engine.factors._factors import Factors as Factors
