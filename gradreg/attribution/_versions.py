"""Versions of packages, for the provenance of results."""

from __future__ import annotations

from importlib import metadata

__all__ = ["version_of"]


def version_of(package: str) -> str | None:
    """Return the installed version; None where there is none, as in a clone that was never installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
