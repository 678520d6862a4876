"""Hydra programs around gradreg; `gradreg train` is the first. Needs the extra `gradreg[experiments]`."""
