"""A Module as a pure function: calling, swapping, heads, kernels, compatibility."""

from gradreg.model._call import base_features as base_features
from gradreg.model._call import call as call
from gradreg.model._compatibility import check_compatible as check_compatible
from gradreg.model._compatibility import check_grad_possible as check_grad_possible
from gradreg.model._compatibility import train_mode_batch_norms as train_mode_batch_norms
from gradreg.model._compatibility import unwrap as unwrap
from gradreg.model._functional import cloned_buffers as cloned_buffers
from gradreg.model._functional import parameter_aliases as parameter_aliases
from gradreg.model._functional import swapped as swapped
from gradreg.model._heads import Ensemble as Ensemble
from gradreg.model._heads import SharedBase as SharedBase
from gradreg.model._kernels import differentiable_kernels as differentiable_kernels
from gradreg.model._run_heads import VMAP_FROM as VMAP_FROM
from gradreg.model._run_heads import HeadsRun as HeadsRun
from gradreg.model._run_heads import Tap as Tap
from gradreg.model._run_heads import aligned_heads as aligned_heads
from gradreg.model._run_heads import tapped as tapped
from gradreg.model._state import devices_of as devices_of
from gradreg.model._state import preserved as preserved
from gradreg.model._state import preserved_attributes as preserved_attributes
from gradreg.model._state import preserved_random_state as preserved_random_state
from gradreg.model._walk import all_modules as all_modules
from gradreg.model._walk import any_trainable as any_trainable
from gradreg.model._walk import walk as walk
