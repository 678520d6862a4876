"""Checkpoints with their learning rates, read from what training programs write."""

from gradreg.tracin.checkpoints._checkpoint import Checkpoint as Checkpoint
from gradreg.tracin.checkpoints._checkpoint import LoadedCheckpoint as LoadedCheckpoint
from gradreg.tracin.checkpoints._load import load_weights as load_weights
from gradreg.tracin.checkpoints._runs import as_checkpoints as as_checkpoints
from gradreg.tracin.checkpoints._runs import read_checkpoints as read_checkpoints
