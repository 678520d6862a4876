"""A store of training gradients on disk, and exact queries over it."""
