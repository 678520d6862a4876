"""TracIn: which training examples raise or lower the loss of a test example, exactly, over every parameter."""

from gradreg.tracin._projection import DenseProjection as DenseProjection
from gradreg.tracin._projection import Projection as Projection
from gradreg.tracin._projection import TwoSidedProjection as TwoSidedProjection
