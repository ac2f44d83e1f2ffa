"""Simulations that march in time, with gradients: implicit steps of sparse nonlinear systems."""

from .run import Gradients, Run
from .steps import ImplicitSteps, TimeSteps

__all__ = ["Gradients", "ImplicitSteps", "Run", "TimeSteps"]
