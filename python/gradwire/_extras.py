"""Packages that only some uses of gradwire need, and what to install where one of them is missing."""

from __future__ import annotations

import importlib.util

from gradwire.errors import MissingExtraError


def is_installed(module: str) -> bool:
    """Whether a module can be found; it is not imported, but its parents are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def require(package: str, extra: str, what: str) -> None:
    """Checks that a package is there whose module has its name.

    Args:
        package: its name.
        extra: of `pip install gradwire[...]`, which brings it.
        what: needs it.

    Raises:
        MissingExtraError: it is not. Fields: extra, package.
    """
    if not is_installed(package):
        raise MissingExtraError(
            f"{what} needs the package {package}, which is not installed: pip install 'gradwire[{extra}]'",
            extra=extra,
            package=package,
        )
