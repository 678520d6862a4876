"""Regularizers: one published method per file."""

from gradreg.regularizers._base import Regularizer as Regularizer
from gradreg.regularizers.attribution_prior import AttributionPrior as AttributionPrior
from gradreg.regularizers.contractive_penalty import ContractivePenalty as ContractivePenalty
from gradreg.regularizers.cure import CURE as CURE
from gradreg.regularizers.derivative_residual import DerivativeResidual as DerivativeResidual
from gradreg.regularizers.diverse_heads import DiverseHeads as DiverseHeads
from gradreg.regularizers.dragan import DRAGAN as DRAGAN
from gradreg.regularizers.finite_difference_gradient_norm import (
    FiniteDifferenceGradientNorm as FiniteDifferenceGradientNorm,
)
from gradreg.regularizers.fish import Fish as Fish
from gradreg.regularizers.fishr import Fishr as Fishr
from gradreg.regularizers.gradient_alignment_loss import GradientAlignmentLoss as GradientAlignmentLoss
from gradreg.regularizers.gradient_matching import GradientMatching as GradientMatching
from gradreg.regularizers.gradient_norm import GradientNorm as GradientNorm
from gradreg.regularizers.gradient_supervision import GradientSupervision as GradientSupervision
from gradreg.regularizers.hessian_penalty import HessianPenalty as HessianPenalty
from gradreg.regularizers.iga import IGA as IGA
from gradreg.regularizers.input_gradient import InputGradient as InputGradient
from gradreg.regularizers.irm_v1 import IRMv1 as IRMv1
from gradreg.regularizers.jacobian_norm import JacobianNorm as JacobianNorm
from gradreg.regularizers.local_independence import LocalIndependence as LocalIndependence
from gradreg.regularizers.local_linearity import LocalLinearity as LocalLinearity
from gradreg.regularizers.path_length import PathLength as PathLength
from gradreg.regularizers.r1 import R1 as R1
from gradreg.regularizers.r2 import R2 as R2
from gradreg.regularizers.right_for_right_reasons import RightForRightReasons as RightForRightReasons
from gradreg.regularizers.sobolev import Sobolev as Sobolev
from gradreg.regularizers.trs import TRS as TRS
from gradreg.regularizers.wgan_gp import WGANGP as WGANGP

__all__ = [
    "CURE",
    "DRAGAN",
    "IGA",
    "R1",
    "R2",
    "TRS",
    "WGANGP",
    "AttributionPrior",
    "ContractivePenalty",
    "DerivativeResidual",
    "DiverseHeads",
    "FiniteDifferenceGradientNorm",
    "Fish",
    "Fishr",
    "GradientAlignmentLoss",
    "GradientMatching",
    "GradientNorm",
    "GradientSupervision",
    "HessianPenalty",
    "IRMv1",
    "InputGradient",
    "JacobianNorm",
    "LocalIndependence",
    "LocalLinearity",
    "PathLength",
    "RightForRightReasons",
    "Sobolev",
]
