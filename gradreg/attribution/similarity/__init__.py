"""Why two gradients differ: token by token, group by group."""

from gradreg.attribution.similarity._calibration import Calibration as Calibration
from gradreg.attribution.similarity._explain import explain_similarity as explain_similarity
from gradreg.attribution.similarity._report import SimilarityReport as SimilarityReport
from gradreg.attribution.similarity._rows import Divergence as Divergence
from gradreg.attribution.similarity._rows import GroupRow as GroupRow
from gradreg.attribution.similarity._rows import TokenRow as TokenRow
from gradreg.attribution.similarity._rows import WhatIf as WhatIf
