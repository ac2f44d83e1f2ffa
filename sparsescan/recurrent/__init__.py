"""Recurrent cells, each defined once; their Jacobians, whole sequences and training steps."""

from ..checks import former_names
from ..graph.functions import (
    layer_norm,
    logsumexp,
    relu,
    rms_norm,
    sigmoid,
    softmax,
    softplus,
    stop_gradient,
    surrogate,
)
from ..graph.operations import Node
from .cell import Cell
from .cells import GRUCell, LSTMCell, RNNCell
from .definition import (
    FORMER_FUNCTIONS,
    Choice,
    Constant,
    Given,
    Hidden,
    Initial,
    Input,
    Mask,
    Scalar,
    State,
    StepNumber,
    Vector,
)
from .networks import GRU, LSTM, RNN, Recurrent

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Cell",
    "Choice",
    "Constant",
    "GRUCell",
    "Given",
    "Hidden",
    "Initial",
    "Input",
    "LSTMCell",
    "Mask",
    "Node",
    "RNNCell",
    "Recurrent",
    "Scalar",
    "State",
    "StepNumber",
    "Vector",
    "layer_norm",
    "logsumexp",
    "relu",
    "rms_norm",
    "sigmoid",
    "softmax",
    "softplus",
    "stop_gradient",
    "surrogate",
]

__getattr__ = former_names(
    __name__,
    {
        "Bias": ("recurrent.definition:Bias", "Vector(…, is_bias=True)"),
        **{name: (f"graph.functions:{name}", text) for name, text in FORMER_FUNCTIONS.items()},
        **{
            name: (f"recurrent.{file}:{name}", "")
            for name, file in (
                ("Gradients", "step"),
                ("Linearization", "jacobian"),
                ("TrainingStep", "step"),
            )
        },
    },
)
