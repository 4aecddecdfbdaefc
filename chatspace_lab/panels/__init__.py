"""Panels for notebooks: one Python class and one front-end module each."""

from chatspace_lab.panels.steering import SteeringPanel
from chatspace_lab.panels.sweep import SweepPanel

__all__ = ["SteeringPanel", "SweepPanel"]
