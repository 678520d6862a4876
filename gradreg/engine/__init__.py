"""The engine: the only package that differentiates. Its doors are `gradients`, `directional` and `plan`."""

from gradreg.engine._checks import has_head_axis as has_head_axis
from gradreg.engine._curvature import curvature as curvature
from gradreg.engine._derivatives import Axis as Axis
from gradreg.engine._derivatives import Derivatives as Derivatives
from gradreg.engine._derivatives import derivatives as derivatives
from gradreg.engine._directional import directional as directional
from gradreg.engine._evaluate import map_heads as map_heads
from gradreg.engine._factors import LinearFactors as LinearFactors
from gradreg.engine._factors import linear_factors as linear_factors
from gradreg.engine._gradients import gradients as gradients
from gradreg.engine._gradients import parameter_gradients as parameter_gradients
from gradreg.engine._observe import grad_mode as grad_mode
from gradreg.engine._plan import Plan as Plan
from gradreg.engine._plan import plan as plan
from gradreg.engine._point_values import point_values as point_values
from gradreg.engine._point_values import values_and_gradients as values_and_gradients
from gradreg.engine._request import head_count as head_count
from gradreg.engine._scale import inner_scale as inner_scale
from gradreg.engine._session import Session as Session
from gradreg.engine._session import Share as Share
from gradreg.engine._session import current_session as current_session
from gradreg.engine._session import open_session as open_session
from gradreg.engine._shapes import draws_random_numbers as draws_random_numbers
from gradreg.engine._shapes import output_shape as output_shape
from gradreg.engine._values import output_scale_derivatives as output_scale_derivatives
from gradreg.engine._values import tensor_gradient as tensor_gradient
