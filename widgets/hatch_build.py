"""Builds the panels' front end when the package is built, also for an editable installation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FrontEnd(BuildHookInterface[Any]):
    """Runs ``widgets/build.py``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files that the wheel takes along as artifacts."""
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("chatspace_lab_widgets", root / "widgets" / "build.py")
        if spec is None or spec.loader is None:
            raise FileNotFoundError(root / "widgets" / "build.py")
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        build.build(root / "chatspace_lab" / "panels" / "static")
