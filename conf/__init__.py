"""The configuration files of the Hydra programs, installed as `gradreg.conf`."""
