"""Simulations that march in time, with gradients: implicit steps of sparse nonlinear systems."""

from .run import Run, SimulationGradients
from .steps import ImplicitSteps, TimeSteps

__all__ = ["ImplicitSteps", "Run", "SimulationGradients", "TimeSteps"]
