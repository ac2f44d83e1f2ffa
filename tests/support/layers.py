"""Layers and cells of every kind, each made by a function of its dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import sparsescan.jacobians as nn
from sparsescan.recurrent import GRUCell, LSTMCell, RNNCell


def mask(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).random(shape) < 0.6


OPERATORS: dict[str, Callable[[Any], nn.Operator]] = {
    "AdaptiveAvgPool2d": lambda dtype: nn.AdaptiveAvgPool2d((3, None), input_shape=(2, 5, 4)),
    "AvgPool2d": lambda dtype: nn.AvgPool2d(2, input_shape=(2, 4, 5)),
    "AvgPool2d-general": lambda dtype: nn.AvgPool2d(
        (3, 2), (2, 1), (1, 0), True, False, input_shape=(2, 4, 5)
    ),
    "BatchNorm1d-affine": lambda dtype: nn.BatchNorm1d(3, input_shape=(3, 4), dtype=dtype),
    "BatchNorm1d-plain": lambda dtype: nn.BatchNorm1d(3, affine=False, input_shape=(3,)),
    "BatchNorm1d-training": lambda dtype: nn.BatchNorm1d(
        3, input_shape=(4, 3), training=True, dtype=dtype
    ),
    "BatchNorm1d-training-plain": lambda dtype: nn.BatchNorm1d(
        3, affine=False, input_shape=(2, 3, 4), training=True
    ),
    "BatchNorm2d-affine": lambda dtype: nn.BatchNorm2d(3, input_shape=(3, 2, 2), dtype=dtype),
    "BatchNorm2d-plain": lambda dtype: nn.BatchNorm2d(
        3, affine=False, input_shape=(2, 3, 2, 2), dtype=dtype
    ),
    "BatchNorm2d-training": lambda dtype: nn.BatchNorm2d(
        3, input_shape=(2, 3, 2, 2), training=True, dtype=dtype
    ),
    "BatchNorm2d-training-plain": lambda dtype: nn.BatchNorm2d(
        3, affine=False, input_shape=(2, 3, 2, 2), training=True
    ),
    "Conv1d": lambda dtype: nn.Conv1d(2, 3, 3, padding=1, input_shape=(2, 5), dtype=dtype, rng=0),
    "Conv1d-same-leading": lambda dtype: nn.Conv1d(
        2, 2, 4, padding="same", bias=False, input_shape=(3, 2, 5), dtype=dtype, rng=0
    ),
    "Conv2d": lambda dtype: nn.Conv2d(2, 3, 3, input_shape=(2, 5, 4), dtype=dtype, rng=0),
    "Conv2d-general": lambda dtype: nn.Conv2d(
        4, 6, (2, 3), (1, 2), (0, 2), (2, 1), 2, input_shape=(4, 5, 6), dtype=dtype, rng=0
    ),
    "Conv2d-masked": lambda dtype: nn.Conv2d(
        2, 3, 3, padding=1, input_shape=(2, 4, 4), weight_mask=mask(3, 2, 3, 3), dtype=dtype, rng=0
    ),
    "ConvTranspose2d": lambda dtype: nn.ConvTranspose2d(
        4, 6, 3, 2, 1, 1, 2, dilation=(1, 2), input_shape=(4, 3, 4), dtype=dtype, rng=0
    ),
    "ConvTranspose2d-masked": lambda dtype: nn.ConvTranspose2d(
        2, 3, 2, bias=False, input_shape=(2, 3, 3), weight_mask=mask(2, 3, 2, 2), dtype=dtype, rng=0
    ),
    "Dropout": lambda dtype: nn.Dropout(0.25, input_shape=(2, 3), mask=mask(2, 3)),
    "Dropout-all": lambda dtype: nn.Dropout(1.0, input_shape=(2, 3), mask=mask(2, 3)),
    "Dropout-none": lambda dtype: nn.Dropout(input_shape=(2, 3)),
    "ELU": lambda dtype: nn.ELU(1.5, input_shape=(2, 3)),
    "Flatten": lambda dtype: nn.Flatten(input_shape=(2, 3, 4)),
    "GELU": lambda dtype: nn.GELU(input_shape=(2, 3)),
    "GELU-tanh": lambda dtype: nn.GELU("tanh", input_shape=(2, 3)),
    "Hardtanh": lambda dtype: nn.Hardtanh(-0.5, 0.7, input_shape=(2, 3)),
    "LayerNorm": lambda dtype: nn.LayerNorm((2, 3), input_shape=(4, 2, 3), dtype=dtype),
    "LayerNorm-no-bias": lambda dtype: nn.LayerNorm(5, bias=False, dtype=dtype),
    "LayerNorm-one": lambda dtype: nn.LayerNorm(1, input_shape=(3, 1), dtype=dtype),
    "LayerNorm-plain": lambda dtype: nn.LayerNorm(3, elementwise_affine=False, input_shape=(2, 3)),
    "LeakyReLU": lambda dtype: nn.LeakyReLU(0.2, input_shape=(2, 3)),
    "Linear": lambda dtype: nn.Linear(4, 3, dtype=dtype, rng=0),
    "Linear-leading": lambda dtype: nn.Linear(
        4, 3, bias=False, input_shape=(2, 4), dtype=dtype, rng=0
    ),
    "Linear-masked": lambda dtype: nn.Linear(
        4, 3, input_shape=(2, 4), weight_mask=mask(3, 4), dtype=dtype, rng=0
    ),
    "MaxPool2d": lambda dtype: nn.MaxPool2d(2, input_shape=(2, 4, 6)),
    "MaxPool2d-ceil": lambda dtype: nn.MaxPool2d(3, 2, ceil_mode=True, input_shape=(2, 4, 6)),
    "MaxPool2d-general": lambda dtype: nn.MaxPool2d(
        (3, 2), (1, 2), (1, 0), (2, 3), input_shape=(2, 5, 6)
    ),
    "Pad": lambda dtype: nn.Pad(((1, 0), (0, 2), (0, 0)), input_shape=(2, 3, 4)),
    "Permute": lambda dtype: nn.Permute((0, 3, 1, 2), input_shape=(2, 3, 4)),
    "ReLU": lambda dtype: nn.ReLU(input_shape=(2, 3)),
    "Residual": lambda dtype: nn.Residual(
        nn.Linear(4, 3, dtype=dtype, rng=0),
        nn.Tanh(input_shape=(3,)),
        nn.Linear(3, 4, dtype=dtype, rng=0),
    ),
    "Residual-diagonal": lambda dtype: nn.Residual(
        nn.Tanh(input_shape=(4,)), nn.Tanh(input_shape=(4,))
    ),
    "Residual-flatten": lambda dtype: nn.Residual(
        nn.Linear(4, 4, dtype=dtype, rng=0), nn.Flatten(input_shape=(4,))
    ),
    "Residual-no-input": lambda dtype: nn.Residual(nn.Linear(4, 4, dtype=dtype, rng=0)),
    "Residual-shortcut": lambda dtype: nn.Residual(
        nn.Linear(4, 6, dtype=dtype, rng=0), shortcut=[nn.Pad(1, input_shape=(4,))]
    ),
    "Residual-no-parameters": lambda dtype: nn.Residual(nn.Tanh(input_shape=(4,))),
    "Sigmoid": lambda dtype: nn.Sigmoid(input_shape=(2, 3)),
    "SiLU": lambda dtype: nn.SiLU(input_shape=(2, 3)),
    "Softmax": lambda dtype: nn.Softmax(2, input_shape=(2, 3, 4)),
    "Softmax-last": lambda dtype: nn.Softmax(-1, input_shape=(2, 3)),
    "Softmax-one": lambda dtype: nn.Softmax(1, input_shape=(1, 3)),
    "Softplus": lambda dtype: nn.Softplus(2.0, 1.0, input_shape=(2, 3)),
    "Upsample": lambda dtype: nn.Upsample(scale_factor=1.5, input_shape=(2, 3, 4)),
    "Upsample-bilinear": lambda dtype: nn.Upsample((5, 4), mode="bilinear", input_shape=(2, 3, 4)),
    "Tanh": lambda dtype: nn.Tanh(input_shape=(2, 3)),
}

CELLS: dict[str, Callable[[Any], Any]] = {
    "RNNCell": lambda dtype: RNNCell(3, 4, dtype=dtype, rng=0),
    "RNNCell-relu": lambda dtype: RNNCell(3, 4, False, "relu", dtype=dtype, rng=0),
    "RNNCell-masked": lambda dtype: RNNCell(3, 4, weight_hh_mask=mask(4, 4), dtype=dtype, rng=0),
    "GRUCell": lambda dtype: GRUCell(3, 4, dtype=dtype, rng=0),
    "GRUCell-no-bias": lambda dtype: GRUCell(3, 4, bias=False, dtype=dtype, rng=0),
    "GRUCell-masked": lambda dtype: GRUCell(
        3, 4, weight_ih_mask=mask(12, 3), weight_hh_mask=mask(12, 4), dtype=dtype, rng=0
    ),
    "LSTMCell": lambda dtype: LSTMCell(3, 4, dtype=dtype, rng=0),
    "LSTMCell-no-bias": lambda dtype: LSTMCell(3, 4, bias=False, dtype=dtype, rng=0),
    "LSTMCell-masked": lambda dtype: LSTMCell(
        3, 4, weight_ih_mask=mask(16, 3), weight_hh_mask=mask(16, 4), dtype=dtype, rng=0
    ),
}
