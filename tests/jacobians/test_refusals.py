"""Arguments of layers and networks that are wrong, and what is said of each."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from refusals import Refusals, check_refusals
from torch import nn

from sparsescan import ImplicitPattern, ImplicitStep, Pattern
from sparsescan.jacobians import (
    ELU,
    GELU,
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Hardtanh,
    LayerNorm,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Pad,
    ReLU,
    Residual,
    Sequential,
    Softplus,
    Upsample,
    from_torch,
)
from sparsescan.symbolic.indexed import IndexedPattern


class Negative(list[Any]):
    """A sequence of negative length."""

    def __len__(self) -> int:
        return -1


NET, X = Sequential([Linear(2, 3)]), [np.ones(2), np.ones(3)]
ROW = Pattern.dense((1, 2))
WEIGHTS = ImplicitPattern([IndexedPattern(ROW, [0, 1], 2)])
conv, flat = partial(Conv2d, 3, 4, input_shape=(3, 8, 8)), partial(Linear, 2, 3)
up = partial(ConvTranspose2d, 1, 1, 3, input_shape=(1, 8, 8))
pooled = {kind: partial(kind, input_shape=(2, 5, 6)) for kind in (MaxPool2d, AvgPool2d)}
highest, mean = pooled[MaxPool2d], pooled[AvgPool2d]
adaptive = partial(AdaptiveAvgPool2d, input_shape=(2, 5, 6))
upsample = partial(Upsample, input_shape=(2, 5, 6))
norm, norm_1d = partial(BatchNorm2d, 3), partial(BatchNorm1d, 3)
drop, pad = partial(Dropout, input_shape=(2,)), partial(Pad, input_shape=(3, 4))
one, batch = (3, 1, 1), (2, 3, 1, 1)
bilinear = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Bilinear(2, 2, 2)))
circular = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))

TABLES: dict[str, Refusals] = {
    "networks": {
        "InputTypeError: ops is a Linear; expected a list": lambda: Sequential(flat()),
        "InputTypeError: activations is a int": lambda: NET.values(5),
        "InputTypeError: out is a int; expected a list": lambda: NET.values(X, out=5),
        "InputTypeError: gradients is a int": lambda: NET.param_grads(X, 5),
        "InputError: a gradient has shape (9,); expected (·, 3)": lambda: NET.param_grads(
            X, [np.ones(9)]
        ),
        "InputError: ops is empty": lambda: Sequential([]),
        "InputTypeError: ops[1] is a str": lambda: Sequential([flat(), "x"]),
        "InputError: ops[1] has input_shape (2,); expected (3,), the output of ops[0]": (
            lambda: Sequential([flat(), flat()])
        ),
        "InputError: ops end with output_shape (3,); expected (2,), the input to which it is "
        "added, or a shortcut": lambda: Residual(flat()),
        "InputError: ops is empty; ": lambda: Residual(shortcut=[flat()]),
        "InputTypeError: shortcut is a Linear; expected a list of operators": (
            lambda: Residual(flat(), shortcut=flat())
        ),
        "InputTypeError: shortcut[1] is a int; expected an Operator": (
            lambda: Residual(flat(), shortcut=[flat(), 5])
        ),
        "InputError: shortcut[1] has input_shape (5,); expected (4,), the output of shortcut[0]": (
            lambda: Residual(flat(), shortcut=[Linear(2, 4), Linear(5, 3)])
        ),
        "InputError: shortcut[0] has input_shape (4,); expected (2,), that of ops[0]": (
            lambda: Residual(flat(), shortcut=[Linear(4, 3)])
        ),
        "InputError: shortcut ends with output_shape (4,); expected (3,), the output of ops": (
            lambda: Residual(flat(), shortcut=[Linear(2, 4)])
        ),
        "InputError: activations has 1 entries; expected 2": lambda: NET.values(X[:1]),
        "InputError: gradients has 0 entries; expected 1": lambda: NET.param_grads(X, []),
        "InputTypeError: gradients cannot be read: … should return >= 0": (
            lambda: NET.param_grads(X, Negative())
        ),
        "InputError: out has 0 entries; expected 1": lambda: NET.values(X, out=[]),
        "MemoryLimitError: the patterns of Sequential( … would take … iB": (
            lambda: Sequential([Conv2d(512, 512, 3, input_shape=(512, 2240, 2240))]).plan()
        ),
    },
    "convolutions": {
        "InputError: input_shape … expected 3 channels": lambda: conv(3, input_shape=(2, 8, 8)),
        "InputError: input_shape … expected at least 3 axes": lambda: conv(3, input_shape=(3, 8)),
        "InputError: input_shape … too small for kernel_size": lambda: conv(9),
        "InputError: … groups is 2": lambda: conv(3, groups=2),
        "InputError: … expected 2 integers": lambda: conv((3,)),
        "InputTypeError: kernel_size is 3.0": lambda: conv(3.0),
        "InputError: stride is 0": lambda: conv(3, 0),
        "InputError: padding is -1": lambda: conv(3, 1, -1),
        "InputError: … 'same' or": lambda: conv(3, 1, "all"),
        "InputError: … a stride of 1": lambda: conv(3, 2, "same"),
        "InputError: padding_mode is 'circular'; expected 'zeros'": (
            lambda: conv(3, padding_mode="circular")
        ),
        "InputTypeError: … weight_mask has dtype float64; expected bool": (
            lambda: conv(3, weight_mask=np.ones((4, 3)))
        ),
        "InputError: … weight_mask has shape (4, 3); expected (4, 3, 3, 3)": (
            lambda: conv(3, weight_mask=np.ones((4, 3), bool))
        ),
        "InputTypeError: dtype is int32": lambda: conv(3, dtype=np.int32),
        "InputError: output_padding is": lambda: up(output_padding=1),
        "InputError: padding is 'same'; expected integers": lambda: up(padding="same"),
    },
    "linear layers": {
        "InputError: … expected a last axis of 3": lambda: Linear(3, 4, input_shape=(4,)),
        "InputError: in_features is 0": lambda: Linear(0, 4),
        "InputError: Linear.weight": lambda: setattr(Linear(3, 4), "weight", np.ones((3, 4))),
        "InputError: … made without it": lambda: setattr(Linear(3, 4, False), "bias", np.ones(4)),
        "InputError: x has shape (4,)": lambda: Linear(3, 4).forward(np.ones(4)),
        "InputTypeError: x has dtype int64": lambda: Linear(3, 4).forward(np.ones(3, int)),
        "InputError: y has shape (3,); expected (4,)": (
            lambda: Linear(3, 4).values(np.ones(3), np.ones(3))
        ),
        "InputError: out is an array of shape (12,) and dtype float64; expected … float32": (
            lambda: Linear(3, 4).values(out=np.ones(12))
        ),
        "InputTypeError: out is a builtins.list": lambda: Linear(3, 4).values(out=[0.0]),
        "InputError: grad_y has shape (3, 4); expected (2, 4)": (
            lambda: Linear(3, 4).param_grads(np.ones((2, 3)), np.ones((3, 4)))
        ),
    },
    "layer normalisation": {
        "InputError: normalized_shape is (); expected at least 1 axis": lambda: LayerNorm(()),
        "InputError: normalized_shape is (0,)": lambda: LayerNorm(0),
        "InputTypeError: normalized_shape is": lambda: LayerNorm("ab"),
        "InputError: eps is -1; expected at least 0": lambda: LayerNorm(3, -1),
        "InputTypeError: eps is None; expected a number": lambda: LayerNorm(3, None),
        "InputError: input_shape is (3, 4); … last axes to be (3,)": (
            lambda: LayerNorm(3, input_shape=(3, 4))
        ),
        "InputError: input_shape is (4,); expected at least 2 axes": (
            lambda: LayerNorm((3, 4), input_shape=(4,))
        ),
        "InputTypeError: dtype is int64; expected float32 or float64": (
            lambda: LayerNorm(3, dtype=np.int64)
        ),
        "InputError: LayerNorm.weight is set to an array of shape (2,)": (
            lambda: setattr(LayerNorm(3), "weight", np.ones(2))
        ),
        "InputError: LayerNorm.bias cannot be set": (
            lambda: setattr(LayerNorm(3, bias=False), "bias", np.ones(3))
        ),
    },
    "batch normalisation": {
        "InputError: num_features is 0; expected at least 1": (
            lambda: BatchNorm2d(0, input_shape=(1, 1, 1))
        ),
        "InputError: input_shape is (4, 2, 2); expected 3 channels": (
            lambda: norm(input_shape=(4, 2, 2))
        ),
        "InputError: input_shape is (3, 2); expected at least 3 axes": (
            lambda: norm(input_shape=(3, 2))
        ),
        "InputError: input_shape is (3, 2, 2); expected (N, C, H, W)": (
            lambda: norm(input_shape=(3, 2, 2), training=True)
        ),
        "InputError: input_shape is (2, 2, 3, 2, 2); expected (N, C, H, W)": (
            lambda: norm(input_shape=(2, 2, 3, 2, 2), training=True)
        ),
        "InputError: … expected more than 1 value per channel in training": (
            lambda: norm(input_shape=(1, 3, 1, 1), training=True)
        ),
        "InputError: eps is 0; expected more in training": (
            lambda: norm(0, input_shape=batch, training=True)
        ),
        "InputError: eps is -1; expected at least 0": lambda: norm(-1, input_shape=one),
        "InputError: training and track_running_stats are both False": (
            lambda: norm(track_running_stats=False, input_shape=one)
        ),
        "InputTypeError: momentum is 'x'; expected a number": (
            lambda: norm(momentum="x", input_shape=one)
        ),
        "InputTypeError: dtype is float16": lambda: norm(input_shape=one, dtype=np.float16),
        "InputError: x has shape (3, 3, 1, 1)": (
            lambda: norm(input_shape=batch, training=True).update_running_stats(np.ones((3, *one)))
        ),
    },
    "batch normalisation of features": {
        "InputError: input_shape is (4, 2); expected 3 channels": lambda: norm_1d(
            input_shape=(4, 2)
        ),
        "InputError: input_shape is (); expected": lambda: norm_1d(input_shape=()),
        "InputError: input_shape is (3,); expected (N, C) or (N, C, L)": (
            lambda: norm_1d(input_shape=(3,), training=True)
        ),
        "InputError: input_shape is (2, 3, 4, 5); expected (N, C) or (N, C, L)": (
            lambda: norm_1d(input_shape=(2, 3, 4, 5), training=True)
        ),
        "InputError: … expected more than 1 value per channel in training": (
            lambda: norm_1d(input_shape=(1, 3), training=True)
        ),
        "InputError: axes is 0": lambda: norm_1d(input_shape=(3, 3, 3), axes=0),
        "InputError: axes is 3": lambda: norm_1d(input_shape=(3, 3, 3), axes=3),
        "InputError: axes is 2, and input_shape (4, 3); expected 1": (
            lambda: norm_1d(input_shape=(4, 3), axes=2, training=True)
        ),
        "InputError: input_shape is (3,); expected at least 2 axes": (
            lambda: norm_1d(input_shape=(3,), axes=2)
        ),
    },
    "activations": {
        "InputError: negative_slope is nan; expected a finite number": (
            lambda: LeakyReLU(math.nan, input_shape=one)
        ),
        "InputTypeError: negative_slope is '1'; expected a number": (
            lambda: LeakyReLU("1", input_shape=one)
        ),
        "InputError: alpha is inf; expected a finite number": lambda: ELU(
            math.inf, input_shape=one
        ),
        "InputError: approximate is 'erf'; expected 'none' or 'tanh'": (
            lambda: GELU("erf", input_shape=one)
        ),
        "InputError: beta is 0; expected another number": lambda: Softplus(0, input_shape=one),
        "InputError: threshold is nan; expected a finite number": (
            lambda: Softplus(threshold=math.nan, input_shape=one)
        ),
        "InputError: max_val is 1; expected more than 1, min_val": (
            lambda: Hardtanh(1, 1, input_shape=one)
        ),
        "InputError: min_val is nan; expected a number": (
            lambda: Hardtanh(math.nan, 1, input_shape=one)
        ),
        "InputTypeError: max_val is None; expected a number": (
            lambda: Hardtanh(0, None, input_shape=one)
        ),
        "InputError: input_shape": lambda: ReLU(input_shape=(0,)),
    },
    "dropout and padding": {
        "InputError: p is -0.1; expected 0 to 1": lambda: drop(-0.1),
        "InputError: p is 1.5; expected 0 to 1": lambda: drop(1.5),
        "InputTypeError: p is '0'; expected a number": lambda: drop("0"),
        "InputTypeError: mask has dtype float64; expected bool": lambda: drop(mask=np.ones(2)),
        "InputError: mask has shape (3, 2, 2); expected (2,) or (batch, 2)": (
            lambda: drop(mask=np.ones((3, 2, 2), bool))
        ),
        "InputError: … expected a pair of integers for each of 2 axes": lambda: pad(((0, 1),) * 3),
        "InputError: pad_width is ((0, 1), (2,)); expected a pair": lambda: pad(((0, 1), (2,))),
        "InputError: pad_width is (); expected a pair": lambda: pad(()),
        "InputTypeError: pad_width is 0.5; expected a pair of integers": lambda: pad(0.5),
        "InputTypeError: pad_width is None; expected a pair of integers": lambda: pad(None),
        "InputTypeError: pad_width is 'ab'; expected a pair of integers": lambda: pad("ab"),
        "InputError: pad_width is … expected integers of at least 0": lambda: pad(
            ((0, 1), (0, -1))
        ),
    },
    "pooling": {
        "InputError: kernel_size is 0; expected integers of at least 1": lambda: highest(0),
        "InputError: kernel_size is (2, 2, 2); expected 2": lambda: highest((2, 2, 2)),
        "InputError: stride is 0; expected integers of at least": lambda: highest(2, 0),
        "InputError: padding is -1; expected integers of at": lambda: highest(2, padding=-1),
        "InputError: dilation is 0; expected integers": lambda: highest(2, dilation=0),
        "InputError: padding is 5; expected at most (1, 1), half the kernel": (
            lambda: highest((3, 2), padding=5)
        ),
        "InputError: padding is (0, 1); expected at mo": lambda: mean(1, padding=(0, 1)),
        "InputError: input_shape is (2, 5, 6); too small for kernel_size (3, 3): the output would "
        "be of size (0, 0)": lambda: highest(3, dilation=3),
        "InputError: … too small for kernel_s": lambda: mean(9, stride=1, ceil_mode=True),
        "InputError: divisor_override is 0; expected at least 1": (
            lambda: mean(2, divisor_override=0)
        ),
        "InputError: output_size is … expected integers of": lambda: adaptive((1, 0)),
        "InputError: output_size is … expected 2 integers": lambda: adaptive((1, 2, 3)),
    },
    "upsampling": {
        "InputError: size is None and scale_factor is None; expected one of them": upsample,
        "InputError: size is 2 and scale_factor is 2; expected one of them": lambda: upsample(2, 2),
        "InputError: size is 0; expected integers of at least 1": lambda: upsample(0),
        "InputError: size is (1, 2, 3); expected 2 integers": lambda: upsample((1, 2, 3)),
        "InputError: mode is 'bicubic'; expected 'nearest' or 'bilinear'": (
            lambda: upsample(2, mode="bicubic")
        ),
        "InputError: align_corners is True; expected None, since mode": (
            lambda: upsample(2, align_corners=True)
        ),
        "InputError: scale_factor is 0; expected positive, finite numbers": (
            lambda: upsample(scale_factor=0)
        ),
        "InputError: scale_factor is (1, -2); expected positive, finite numb": (
            lambda: upsample(scale_factor=(1, -2))
        ),
        "InputError: scale_factor is inf; expected positive, finite numbers": (
            lambda: upsample(scale_factor=math.inf)
        ),
        "InputError: scale_factor is nan; expected positive, finite numbers": (
            lambda: upsample(scale_factor=math.nan)
        ),
        "InputError: scale_factor is (1, 0.1); too small for input_shape (2, 5, 6): the output "
        "would be of size (5, 0)": lambda: upsample(scale_factor=(1, 0.1)),
    },
    "indices of weights": {
        "InputTypeError: pattern is 3; expected a Pattern": lambda: IndexedPattern(3, [0], 1),
        "InputError: index has 1 entries; expected 2": lambda: IndexedPattern(ROW, [0], 1),
        "InputError: index has 1; expected weights": lambda: IndexedPattern(ROW, [0, 1], 1),
        "InputError: index has -1; expected": lambda: IndexedPattern(ROW, [0, -1], 1),
        "InputTypeError: … dtype float64; expected int": lambda: IndexedPattern(ROW, [0.5, 1], 2),
        "InputError: … expected one dimension": lambda: IndexedPattern(ROW, [[0, 1]], 2),
        "InputError: size is -2; expected at": lambda: IndexedPattern(ROW, [0, 1], -2),
        "InputError: values[0] has shape (3,); expected (2,), the weights of IndexedPattern": (
            lambda: ImplicitStep([np.ones(3)], WEIGHTS)
        ),
        "InputError: values[0] has shape (4, 2); expected (2,)": (
            lambda: ImplicitStep([np.ones((4, 2))], WEIGHTS)
        ),
    },
    "modules of PyTorch": {
        "InputError: module[1][0] is a Bilinear, which has no operator; expected one of … ReLU": (
            lambda: from_torch(bilinear, (2,))
        ),
        "InputError: module[0] (Conv2d): padding_mode is 'circular'": (
            lambda: from_torch(circular, (1, 4, 4))
        ),
        "InputError: … (Dropout): it draws its own mask": (
            lambda: from_torch(nn.Sequential(nn.Dropout(0.5)), (2,))
        ),
        "InputError: … return_indices is True": (
            lambda: from_torch(nn.MaxPool2d(2, return_indices=True), (1, 4, 4))
        ),
        "InputTypeError: … dtype float16; expected float32": (
            lambda: from_torch(nn.Linear(2, 2).half(), (2,))
        ),
        "InputError: module (Linear): input_shape is (3,)": (
            lambda: from_torch(nn.Linear(2, 2), (3,))
        ),
        "InputTypeError: … input_shape is 2.5": lambda: from_torch(nn.Linear(2, 2), 2.5),
        "InputTypeError: module is a ufunc; expected a torch.nn.Module": (
            lambda: from_torch(np.tanh, (2,))
        ),
        "InputTypeError: … dim is None": lambda: from_torch(nn.Softmax(), (2,)),
    },
}


@pytest.mark.parametrize("what", TABLES)
def test_what_is_wrong_is_named(what: str) -> None:
    check_refusals(TABLES[what])
