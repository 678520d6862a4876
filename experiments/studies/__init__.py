"""Published behavior of the regularizers, reproduced offline: one study per file, run by `gradreg study`."""

from gradreg.experiments.studies.irm_colored_digits import IRMColoredDigits
from gradreg.experiments.studies.jacobian_noise_digits import JacobianNoiseDigits
from gradreg.experiments.studies.pinn import PINN
from gradreg.experiments.studies.rrr_decoy_digits import RRRDecoyDigits
from gradreg.experiments.studies.wgan_gp_mixture import WGANGPMixture

__all__ = ["PINN", "IRMColoredDigits", "JacobianNoiseDigits", "RRRDecoyDigits", "WGANGPMixture"]
