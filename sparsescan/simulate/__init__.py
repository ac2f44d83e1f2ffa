"""Simulations that march in time, with gradients: implicit steps of sparse nonlinear systems."""

from ..checks import former_names
from .steps import ImplicitSteps, TimeSteps

__all__ = ["ImplicitSteps", "TimeSteps"]

__getattr__ = former_names(
    __name__,
    {
        "Run": ("simulate.run:Run", ""),
        "SimulationGradients": ("simulate.run:SimulationGradients", ""),
    },
)
