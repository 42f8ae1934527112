"""Fits the transforms of a model's INT2 cache and says how good they are."""

from calib.covariance import LayerStatistics, Moments
from calib.fit import FitReport, fit
from calib.recipes import RECIPES, Recipe, recipe

__all__ = ["RECIPES", "FitReport", "LayerStatistics", "Moments", "Recipe", "fit", "recipe"]
