"""Layers as sparse transposed Jacobians: pattern once, values on every iteration.

Names and arguments are those of ``torch.nn``; :class:`Sequential` makes a chain of them.

If few weights are kept, kernels read only those. A NaN or an infinity then does not pass a pruned
weight; in a dense layer, its product with 0 is NaN.

>>> import numpy as np
>>> from sparsescan.jacobians import Linear, Sequential, Tanh
>>> net = Sequential([Linear(3, 2, rng=0), Tanh(input_shape=(2,))])
>>> xs = net.activations(np.ones((5, 3), np.float32))
>>> grads = net.plan().inclusive_scan(np.ones((5, 2), np.float32), net.values(xs))
>>> [grad.shape for grad in grads]
[(5, 2), (5, 2), (5, 3)]
"""

from ..checks import former_names
from .activations import (
    ELU,
    GELU,
    Hardtanh,
    LeakyReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from .conv import Conv1d, Conv2d, ConvTranspose2d
from .linear import Linear
from .normalization import BatchNorm1d, BatchNorm2d, LayerNorm
from .pooling import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from .pytorch import from_torch
from .reshape import Dropout, Flatten, Pad, Permute
from .sequential import Residual, Sequential
from .upsample import Upsample

__all__ = [
    "ELU",
    "GELU",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Flatten",
    "Hardtanh",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool2d",
    "Pad",
    "Permute",
    "ReLU",
    "Residual",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "Upsample",
    "from_torch",
]

__getattr__ = former_names(
    __name__,
    {
        "NetworkGradients": ("jacobians.training.network_step:NetworkGradients", ""),
        "NetworkStep": ("jacobians.training.network_step:NetworkStep", ""),
        "Operator": ("jacobians.shared.operator:Operator", ""),
    },
)
