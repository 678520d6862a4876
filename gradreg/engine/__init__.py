"""The engine: the only package that differentiates. Its doors are `gradients`, `directional`, `products` and `plan`."""

from gradreg.engine._checks import has_head_axis as has_head_axis
from gradreg.engine._directional import directional as directional
from gradreg.engine._evaluate import map_heads as map_heads
from gradreg.engine._gradients import gradients as gradients
from gradreg.engine._gradients import parameter_gradients as parameter_gradients
from gradreg.engine._observe import grad_mode as grad_mode
from gradreg.engine._plan import Plan as Plan
from gradreg.engine._plan import plan as plan
from gradreg.engine._products import collect_factors as collect_factors
from gradreg.engine._products import products as products
from gradreg.engine._session import Session as Session
from gradreg.engine._session import Share as Share
from gradreg.engine._session import current_session as current_session
from gradreg.engine._session import open_session as open_session
from gradreg.engine.factors import Coverage as Coverage
from gradreg.engine.factors import Factors as Factors
