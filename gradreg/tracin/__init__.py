"""TracIn: which training examples raise or lower the loss of a test example, exactly, over every parameter."""

from gradreg.tracin._data import RowId as RowId
from gradreg.tracin._data import Rows as Rows
from gradreg.tracin._data import read_rows as read_rows
from gradreg.tracin._diagnostics import CoverageReport as CoverageReport
from gradreg.tracin._diagnostics import Dominance as Dominance
from gradreg.tracin._diagnostics import score_dominance as score_dominance
from gradreg.tracin._projection import DenseProjection as DenseProjection
from gradreg.tracin._projection import Projection as Projection
from gradreg.tracin._projection import TwoSidedProjection as TwoSidedProjection
from gradreg.tracin._ranking import Ranking as Ranking
from gradreg.tracin._ranking import TopK as TopK
from gradreg.tracin._tracin import TracIn as TracIn
from gradreg.tracin.checkpoints import Checkpoint as Checkpoint
from gradreg.tracin.checkpoints import read_checkpoints as read_checkpoints
from gradreg.tracin.index import GradientIndex as GradientIndex
