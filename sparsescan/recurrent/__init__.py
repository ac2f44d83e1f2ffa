"""Recurrent cells and networks of them: Jacobians, whole sequences and training steps."""

from .cell import Cell, Linearization
from .cells import GRUCell, LSTMCell, RNNCell
from .networks import GRU, LSTM, RNN, Recurrent
from .step import Gradients, TrainingStep

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Cell",
    "GRUCell",
    "Gradients",
    "LSTMCell",
    "Linearization",
    "RNNCell",
    "Recurrent",
    "TrainingStep",
]
