"""Diagnosis: whether and where a penalty can be differentiated again."""

from gradreg.diagnosis._check import check_double_backward as check_double_backward
from gradreg.diagnosis._first_check import first_check as first_check
from gradreg.diagnosis._report import Cause as Cause
from gradreg.diagnosis._report import DoubleBackwardReport as DoubleBackwardReport
from gradreg.diagnosis._report import ParameterReport as ParameterReport
from gradreg.diagnosis._smooth import ActivationSwaps as ActivationSwaps
from gradreg.diagnosis._smooth import SecondPass as SecondPass
from gradreg.diagnosis._smooth import smooth_activations as smooth_activations
