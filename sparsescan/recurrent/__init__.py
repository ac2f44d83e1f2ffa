"""Recurrent cells, each defined once; their Jacobians, whole sequences and training steps."""

from ..graph import functions
from ..graph.functions import *  # noqa: F403, those that it lists
from .cell import Cell
from .cells import GRUCell, LSTMCell, RNNCell
from .definition import Bias, Choice, Constant, Hidden, Input, Scalar, Vector
from .jacobian import Linearization
from .networks import GRU, LSTM, RNN, Recurrent
from .step import Gradients, TrainingStep

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Bias",
    "Cell",
    "Choice",
    "Constant",
    "GRUCell",
    "Gradients",
    "Hidden",
    "Input",
    "LSTMCell",
    "Linearization",
    "RNNCell",
    "Recurrent",
    "Scalar",
    "TrainingStep",
    "Vector",
]
__all__ += functions.__all__
