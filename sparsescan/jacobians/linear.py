"""Linear layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..checks import check_count
from ..errors import InputError
from ..symbolic.pattern import Pattern
from .kernels.values import transpose
from .shared.checks import Shape
from .shared.stencil import Weighing
from .shared.windows import Window

Array = Any


class Linear(Weighing):
    """Matrix product: ``y = W x + b``, so ``(∂y/∂x)ᵀ = Wᵀ``.

    Parameters
    ----------
    in_features, out_features : int
        Length of the input and the output.
    bias : bool, default True
        Whether there is one.
    input_shape : tuple of int, optional
        ``(in_features,)``, the default; more axes may come first.
    weight_mask : array_like of bool, shape (out_features, in_features), optional
        True where a weight is kept. A pruned weight counts as 0, has a gradient of 0, and leaves
        the pattern.
    dtype : {float32, float64}, default float32
        Dtype of initial parameters.
    rng : numpy.random.Generator or int, optional
        Source of the initial parameters, from the same distribution as PyTorch.

    Attributes
    ----------
    weight : ndarray, shape (out_features, in_features)
        The weight; an array that is set is shared, not copied.
    bias : ndarray or None, shape (out_features,)
        The bias.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.Linear`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import Linear
    >>> layer = Linear(3, 2, weight_mask=[[True, False, True], [False, True, False]])
    >>> layer.weight = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> layer.jacobian().toarray()
    array([[1., 0.],
           [0., 5.],
           [3., 0.]])
    """

    windows = (Window(1, 1, 1, 0, 0, 1),) * 2

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_shape: Any = None,
        weight_mask: ArrayLike | None = None,
        dtype: DTypeLike = np.float32,
        rng: np.random.Generator | int | None = None,
    ) -> None:
        self.in_features = check_count("in_features", in_features, 1)
        self.out_features = check_count("out_features", out_features, 1)
        self._set_shapes((self.in_features,) if input_shape is None else input_shape, 1)
        if self._core != (self.in_features,):
            raise InputError(
                f"input_shape is {self.input_shape}; expected a last axis of {self.in_features}, "
                "in_features"
            )
        self._set_output((self.out_features,))
        self.sides = (self.in_features, 1, 1), (self.out_features, 1, 1)
        self._declare_weight((), bias, weight_mask, dtype, rng)

    def _arguments(self, input_shape: Shape, channels: slice) -> dict[str, Any]:
        outputs = len(range(*channels.indices(self.out_features)))
        sizes = {"in_features": self.in_features, "out_features": outputs}
        return sizes | super()._arguments(input_shape, channels)

    def _core_pattern(self) -> Pattern:
        if self._mask is None:
            return Pattern.dense((self.in_features, self.out_features))
        return super()._core_pattern()

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        if self._mask is not None:
            super()._fill(xp, x, y, out)
            return
        matrix = out.reshape(self.in_features, self.out_features)
        if xp is np:
            transpose(self.read_parameter("weight"), matrix)
        else:
            matrix[...] = self.weight.T

    def _forward(self, xp: Any, x: Array) -> Array:
        y = xp.matmul(x, self.kept_weight(xp).T)
        return y if self.bias is None else y + self.bias

    def _param_grads(self, xp: Any, x: Array, grad_y: Array) -> dict[str, Array]:
        return self.weight_grads(xp, xp.matmul(grad_y.T, x), grad_y, (0,))
