"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

LAB_EXTRA = ("pandas", "plotly", "safetensors", "sklearn", "threadpoolctl")
"""Modules that come with the extra ``lab``."""


def names(
    package: str, home: Mapping[str, str], extra: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``.

    Parameters
    ----------
    package
        Its ``__name__``.
    home
        The module of each name, below the package.
    extra
        Modules that need the extra ``lab``: without one of them, the error says what to install.
    """

    def getattr_(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name not in extra:
                raise
            needed = f"{name} needs {error.name}: pip install 'chatspace-lab[lab]'"
            raise ModuleNotFoundError(needed, name=error.name) from error

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return getattr_, dir_
