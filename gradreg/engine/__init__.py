"""The engine: the only package that differentiates. Its doors are `gradients`, `directional` and `plan`."""

from gradreg.engine._checks import has_head_axis as has_head_axis
from gradreg.engine._curvature import CURVED as CURVED
from gradreg.engine._curvature import LINEAR as LINEAR
from gradreg.engine._curvature import PARTLY as PARTLY
from gradreg.engine._curvature import PIECEWISE as PIECEWISE
from gradreg.engine._curvature import RAISES as RAISES
from gradreg.engine._curvature import WRONG as WRONG
from gradreg.engine._curvature import Curvature as Curvature
from gradreg.engine._directional import directional as directional
from gradreg.engine._evaluate import map_heads as map_heads
from gradreg.engine._gradients import gradients as gradients
from gradreg.engine._gradients import parameter_gradients as parameter_gradients
from gradreg.engine._observe import grad_mode as grad_mode
from gradreg.engine._plan import Plan as Plan
from gradreg.engine._plan import plan as plan
from gradreg.engine._probe import probe as probe
from gradreg.engine._record import Call as Call
from gradreg.engine._record import GradientCall as GradientCall
from gradreg.engine._record import Record as Record
from gradreg.engine._record import recorded as recorded
from gradreg.engine._session import Session as Session
from gradreg.engine._session import Share as Share
from gradreg.engine._session import current_session as current_session
from gradreg.engine._session import open_session as open_session
