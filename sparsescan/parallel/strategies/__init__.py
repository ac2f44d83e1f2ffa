"""Ways to spread a training step over workers, behind one interface."""

from .graph import Graph, Layer
from .machine import Machine
from .strategy import Prediction, Strategy, Training

__all__ = ["Graph", "Layer", "Machine", "Prediction", "Strategy", "Training"]
