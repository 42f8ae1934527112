"""Fits the transforms of a model's INT2 cache and says how good they are.

``Moments`` and ``fit`` serve a custom model; ``calibrate`` runs a model of ``oscar_jax.models``.
"""

from calib.calibration import calibrate
from calib.covariance import LayerStatistics, Moments
from calib.data import Text
from calib.fit import FitReport, fit
from calib.held_out import Errors, HeldOut, measure
from calib.recipes import RECIPES, Recipe, recipe
from calib.report import CalibrationReport

__all__ = [
    "RECIPES",
    "CalibrationReport",
    "Errors",
    "FitReport",
    "HeldOut",
    "LayerStatistics",
    "Moments",
    "Recipe",
    "Text",
    "calibrate",
    "fit",
    "measure",
    "recipe",
]
