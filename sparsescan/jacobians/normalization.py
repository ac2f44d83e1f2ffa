"""Normalisations, with the statistics of each sample or of the batch."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..arrays.arrays import namespace
from ..chains.containers import check_dtype
from ..checks import check_count, check_flag, check_number
from ..errors import InputError, short
from ..execution.sharing import quiet
from ..parameters.parametrised import Initial, Parameter, Parametrised
from .shared.checks import Shape, check_sizes
from .shared.coupled import Coupled

Array = Any


class _Normalisation(Parametrised, Coupled):
    """A normalisation: its slopes are ``1/σ``, or their products with a weight."""

    weight = Parameter()
    bias = Parameter()

    eps: float
    _terms = 2

    def _along(self, array: Array) -> Array:
        """Return a parameter with the axes of a sample, or 1 for some of them."""
        return array

    @abstractmethod
    def _joint(self, x: Array) -> tuple[int, ...]:
        """Return the axes over which elements are normalised together."""

    @abstractmethod
    def _shared(self, x: Array) -> tuple[int, ...]:
        """Return the axes along which elements share parameters."""

    def _normalise(self, xp: Any, x: Array) -> tuple[Array, Array]:
        """Return ``x̂`` and ``1/σ``, which has axes of length 1."""
        # As in PyTorch, one non-finite value makes everything normalised with it NaN.
        axes, wide = self._joint(x), x.astype(np.float64, copy=False)
        wide = wide - wide.mean(axis=axes, keepdims=True)
        inverse = 1 / xp.sqrt((wide * wide).mean(axis=axes, keepdims=True) + self.eps)
        wide *= inverse
        return wide.astype(x.dtype, copy=False), inverse.astype(x.dtype, copy=False)

    def _weighted(self, array: Array) -> Array:
        return array if self.weight is None else array * self._along(self.weight)

    def _forward(self, xp: Any, x: Array) -> Array:
        y = self._weighted(self._normalise(xp, x)[0])
        return y if self.bias is None else y + self._along(self.bias)

    def _factors(self, xp: Any, x: Array, y: Array) -> tuple[Array, list[tuple[Any, Array]]]:
        # slope_j (δ_ij - 1/m - x̂_i x̂_j/m)
        normal, inverse = self._normalise(xp, x)
        slope, count = self._weighted(inverse), self._count
        terms = [(normal / -count, slope * normal), (-1 / count, slope)]
        return xp.broadcast_to(slope, normal.shape), terms

    def _param_grads(self, xp: Any, x: Array, grad_y: Array) -> dict[str, Array]:
        axes, normal = self._shared(x), self._normalise(xp, x)[0]
        grads = {"weight": (grad_y * normal).sum(axis=axes)}
        return grads if self.bias is None else grads | {"bias": grad_y.sum(axis=axes)}


class LayerNorm(_Normalisation):
    """``y = γ x̂ + β`` with ``x̂ = (x - μ)/σ``, by the mean and variance over the last axes.

    With ``m`` elements normalised together and ``σ² = Σ_k (x_k - μ)²/m + eps``,

        ∂y_j/∂x_i = γ_j/σ (δ_ij - 1/m - x̂_i x̂_j/m).

    Parameters
    ----------
    normalized_shape : int or tuple of int
        Shape of the last axes, which are normalised together.
    eps : float, default 1e-5
        Added to the variance; at least 0.
    elementwise_affine : bool, default True
        Whether there is a weight ``γ``; otherwise it is 1, and ``β`` is 0.
    bias : bool, default True
        Whether there is a bias ``β`` besides the weight; otherwise it is 0.
    input_shape : tuple of int, optional
        `normalized_shape`, the default; more axes may come first.
    dtype : {float32, float64}, default float32
        Dtype of the initial parameters.

    Attributes
    ----------
    weight, bias : ndarray or None, shape normalized_shape
        ``γ``, initially 1, and ``β``, initially 0; an array that is set is shared, not copied.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.LayerNorm`. The Jacobian has a dense block for every group of elements that
    are normalised together. A group of one element is always normalised to 0, and without `eps` a
    group of two to ±1. Its output is constant, so the pattern is empty.

    Statistics of float32 values are computed in float64, which avoids overflow and cancellation.

    Examples
    --------
    >>> from sparsescan.jacobians import LayerNorm
    >>> LayerNorm(3, input_shape=(2, 3)).pattern
    Pattern((6, 6), nnz=18, general)
    >>> LayerNorm(3, eps=0).jacobian([-1.0, 0.0, 1.0]).toarray().round(3)
    array([[ 0.204, -0.408,  0.204],
           [-0.408,  0.816, -0.408],
           [ 0.204, -0.408,  0.204]])
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        input_shape: Any = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        one = isinstance(normalized_shape, int | np.integer)
        shape = check_sizes("normalized_shape", (normalized_shape,) if one else normalized_shape)
        if not shape:
            raise InputError("normalized_shape is (); expected at least 1 axis")
        self.normalized_shape = shape
        self.eps = _check_eps(eps)
        self._set_shapes(shape if input_shape is None else input_shape, len(shape))
        if self._core != shape:
            raise InputError(
                f"input_shape is {self.input_shape}; expected the last axes to be {shape}, "
                "normalized_shape"
            )
        self._set_output(shape)
        size = math.prod(shape)
        self._grouping, self._is_constant = (1, 1, size), size == 1 or (size == 2 and self.eps == 0)
        names = ["weight"] if check_flag("elementwise_affine", elementwise_affine) else []
        names += ["bias"] if names and check_flag("bias", bias) else []
        self.declare_parameters(dict.fromkeys(names, shape), _ones_and_zeros(dtype))

    def _joint(self, x: Array) -> tuple[int, ...]:
        return tuple(range(1, x.ndim))

    def _shared(self, x: Array) -> tuple[int, ...]:
        return (0,)


class BatchNorm(_Normalisation):
    """Batch normalisation of samples of any number of axes."""

    running_mean = Parameter()
    running_var = Parameter()

    _axes = 3  # axes of a sample; the first is the channels

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        input_shape: Any,
        training: bool = False,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self.training = check_flag("training", training)
        shape = check_sizes("input_shape", input_shape)
        if self.training and len(shape) != self._axes + 1:
            wanted = "(N, C, H, W)" if self._axes == 3 else "(N, C) or (N, C, L)"
            raise InputError(
                f"input_shape is {shape}; expected {wanted}, since training couples the samples of "
                "a batch"
            )
        self.num_features = check_count("num_features", num_features, 1)
        self.eps = _check_eps(eps)
        self.momentum = None if momentum is None else check_number("momentum", momentum)
        self.track_running_stats = check_flag("track_running_stats", track_running_stats)
        self._batches = np.zeros((), np.int64)  # or the memory of a PyTorch module
        self._set_shapes(shape, None if self.training else self._axes)
        # In evaluation, elements do not affect each other.
        together = self._core[0], self.num_features, self.channel_size
        self._grouping = together if self.training else (1, math.prod(self._core), 1)
        self._check_arguments()
        self._set_output(self._core)
        self._reads_input = self.training
        names = ["weight", "bias"] if check_flag("affine", affine) else []
        names += ["running_mean", "running_var"] if self.track_running_stats else []
        shapes = dict.fromkeys(names, (self.num_features,))
        self.declare_parameters(shapes, _ones_and_zeros(dtype))

    def _arguments(self, input_shape: Shape, channels: slice) -> dict[str, Any]:
        names = "eps", "momentum", "track_running_stats", "training"
        return {
            "num_features": len(range(*channels.indices(self.num_features))),
            "affine": self.weight is not None,
            **{name: getattr(self, name) for name in names},
        }

    def _check_arguments(self) -> None:
        shape, axes = self.input_shape, self._axes
        if self._core[-axes] != self.num_features:
            behind = (
                ", before the last two axes" if axes == 3 else ", as the first axis of a sample"
            )
            raise InputError(
                f"input_shape is {shape}; expected {self.num_features} channels, num_features"
                f"{behind}"
            )
        if self.training and self._count == 1:
            raise InputError(
                f"input_shape is {shape}; expected more than 1 value per channel in training"
            )
        if self.training and self.eps == 0:
            raise InputError("eps is 0; expected more in training")
        if not self.training and not self.track_running_stats:
            raise InputError(
                "training and track_running_stats are both False; expected one of them to be True: "
                "without running statistics PyTorch uses those of the batch, as in training"
            )

    @property
    def params(self) -> dict[str, Array]:
        """The parameters by their names, not copied; without the running statistics."""
        return {} if self.weight is None else {"weight": self.weight, "bias": self.bias}

    @property
    def num_batches_tracked(self) -> int:
        """How many batches have updated the running statistics."""
        return int(self._batches)

    @num_batches_tracked.setter
    def num_batches_tracked(self, count: int) -> None:
        self._batches = np.array(check_count("num_batches_tracked", count, 0))

    @property
    def channel_size(self) -> int:
        """Elements of a channel of a sample."""
        return math.prod(self._core[len(self._core) - self._axes + 1 :])

    def _along(self, array: Array) -> Array:
        """Return an array of one number for each channel with axes for the elements of one."""
        return array.reshape(-1, *(1,) * (self._axes - 1))

    def _joint(self, x: Array) -> tuple[int, ...]:
        """Return the axes of ``(batches, N, C, …)`` for a channel in training."""
        return 1, *range(3, x.ndim)

    def _shared(self, x: Array) -> tuple[int, ...]:
        return tuple(axis for axis in range(x.ndim) if axis != x.ndim - self._axes)

    @quiet
    def update_running_stats(self, x: Array) -> None:
        """Update the running statistics with a batch, as PyTorch's forward does in training mode.

        The update with the newest statistics ``s`` is
        ``running = (1 - momentum) running + momentum s``. If `momentum` is None,
        ``1/num_batches_tracked`` replaces it. The variance is the unbiased one. The arrays are
        changed in place.

        Parameters
        ----------
        x : array_like, shape (N, C, …) or (batch, N, C, …)
            The input. Several batches update one after the other.

        Raises
        ------
        InputError
            If the layer is not in training mode, or has no running statistics, or the shape is
            wrong.
        InputTypeError
            If the dtype is wrong.
        DeviceError
            If input and statistics are on different devices.
        """
        if not (self.training and self.track_running_stats):
            raise InputError(
                "update_running_stats needs a layer made with training=True and "
                "track_running_stats=True"
            )
        x, _ = self._read("x", x, self.input_shape)
        namespace(x, self.running_mean, self.running_var)
        x = x.reshape(-1, *self._core).astype(np.float64, copy=False)
        axes = self._joint(x)
        for mean, variance in zip(x.mean(axis=axes), x.var(axis=axes), strict=True):
            self._take_in(mean, variance)

    def _take_in(self, mean: Array, variance: Array) -> None:
        """Update the running statistics with the mean and variance of a batch."""
        self._batches += 1  # in place: it may be shared
        part = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        unbiased = variance * (self._count / (self._count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running *= 1 - part
            running += part * new

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        if self.training:
            super()._fill(xp, x, y, out)
        else:
            out.reshape(self._core)[...] = self._weighted(self._along(self._running(out)[1]))

    def _normalise(self, xp: Any, x: Array) -> tuple[Array, Array]:
        if self.training:
            return super()._normalise(xp, x)
        mean, inverse = map(self._along, self._running(x))
        return (x - mean) * inverse, inverse

    def _running(self, like: Array) -> tuple[Array, Array]:
        """Return the running mean and ``1/σ`` in the dtype and on the device of an array."""
        xp = namespace(like, self.running_mean, self.running_var)
        mean, variance = (
            array.astype(like.dtype, copy=False) for array in (self.running_mean, self.running_var)
        )
        return mean, 1 / xp.sqrt(variance + self.eps)


class BatchNorm2d(BatchNorm):
    """``y = γ x̂ + β`` with ``x̂ = (x - μ)/σ``, by a mean and variance for each channel.

    In evaluation mode these are running statistics, ``σ² = running_var + eps``. The Jacobian is
    diagonal, and equal for all samples: ``∂y_i/∂x_i = γ_c/σ_c`` in channel ``c``.

    In training mode they are batch statistics, over the ``m = N·H·W`` elements of a channel, with
    ``σ² = Σ_k (x_k - μ)²/m + eps``. That couples the samples, so the vector of the Jacobian is a
    whole batch. For ``i`` and ``j`` in channel ``c``,
    ``∂y_j/∂x_i = γ_c/σ_c (δ_ij - 1/m - x̂_i x̂_j/m)``.

    Parameters
    ----------
    num_features : int
        Channels ``C``.
    eps : float, default 1e-5
        Added to the variance; at least 0, and in training mode more than 0.
    momentum : float or None, default 0.1
        Weight of the newest batch in the running statistics; None weights all batches equally.
    affine : bool, default True
        Whether there are parameters ``γ`` and ``β``; otherwise they are 1 and 0.
    track_running_stats : bool, default True
        Whether there are running statistics, which evaluation needs.
    input_shape : tuple of int
        In evaluation mode ``(C, H, W)``; more axes may come first. In training mode
        ``(N, C, H, W)``, the shape of a batch.
    training : bool, default False
        Whether to normalise by the statistics of the batch.
    dtype : {float32, float64}, default float32
        Dtype of the initial parameters and running statistics.

    Attributes
    ----------
    weight, bias : ndarray or None, shape (C,)
        ``γ``, initially 1, and ``β``, initially 0; an array that is set is shared, not copied.
    running_mean, running_var : ndarray or None, shape (C,)
        The running statistics, initially 0 and 1. They are no parameters, and do not affect the
        dtype of a result. An array that is set is shared, not copied.
    num_batches_tracked : int
        How many batches have updated the running statistics.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.BatchNorm2d`, except that ``forward`` never changes the running statistics:
    :meth:`update_running_stats` does, here and of a :class:`.NetworkStep`.

    In training mode, the batch axis that ``forward`` and ``values`` accept before `input_shape`
    counts batches, not samples. Each batch is normalised separately.

    Examples
    --------
    >>> from sparsescan.jacobians import BatchNorm2d
    >>> BatchNorm2d(3, input_shape=(3, 2, 2))
    BatchNorm2d((3, 2, 2) → (3, 2, 2), nnz=12)
    >>> BatchNorm2d(1, input_shape=(2, 1, 1, 1), training=True, eps=1.0).jacobian(
    ...     [[[[1.0]]], [[[-1.0]]]]
    ... ).toarray().round(3)
    array([[ 0.177, -0.177],
           [-0.177,  0.177]])
    """


class BatchNorm1d(BatchNorm):
    """``y = γ x̂ + β`` with ``x̂ = (x - μ)/σ``, by a mean and variance for each channel.

    It is :class:`BatchNorm2d` for samples ``(C,)`` or ``(C, L)``. In evaluation mode it uses
    running statistics, and ``∂y_i/∂x_i = γ_c/σ_c`` in channel ``c``. In training mode it uses batch
    statistics, over the ``m = N`` or ``N·L`` elements of a channel. For ``i`` and ``j`` in channel
    ``c``, ``∂y_j/∂x_i = γ_c/σ_c (δ_ij - 1/m - x̂_i x̂_j/m)``.

    Parameters
    ----------
    num_features : int
        Channels ``C``.
    eps, momentum, affine, track_running_stats
        As for :class:`BatchNorm2d`.
    input_shape : tuple of int
        In evaluation mode ``(C,)`` or ``(C, L)``; more axes may come first. In training mode
        ``(N, C)`` or ``(N, C, L)``, the shape of a batch.
    training : bool, default False
        Whether to normalise by the statistics of the batch.
    axes : {1, 2}, optional
        The number of axes of a sample; by default 2, ``(C, L)``, if `input_shape` has as many.
    dtype : {float32, float64}, default float32
        Dtype of the initial parameters and running statistics.

    Attributes
    ----------
    weight, bias, running_mean, running_var, num_batches_tracked
        As those of :class:`BatchNorm2d`.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.BatchNorm1d`, except that ``forward`` never changes the running statistics:
    :meth:`update_running_stats` does, here and of a :class:`.NetworkStep`.

    Examples
    --------
    >>> from sparsescan.jacobians import BatchNorm1d
    >>> BatchNorm1d(3, input_shape=(3, 5))
    BatchNorm1d((3, 5) → (3, 5), nnz=15)
    >>> BatchNorm1d(1, input_shape=(2, 1), training=True, eps=1.0).jacobian(
    ...     [[1.0], [-1.0]]
    ... ).toarray().round(3)
    array([[ 0.177, -0.177],
           [-0.177,  0.177]])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        input_shape: Any,
        training: bool = False,
        axes: int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        shape = check_sizes("input_shape", input_shape)
        own = len(shape) - check_flag("training", training)
        most = max(min(own, 2), 1)
        self._axes = most if axes is None else check_count("axes", axes, 1)
        if self._axes > 2 or (training and own == most != self._axes):
            raise InputError(f"axes is {self._axes}, and input_shape {shape}; expected {most}")
        options: Any = {"input_shape": shape, "training": training, "dtype": dtype}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)

    def _arguments(self, input_shape: Shape, channels: slice) -> dict[str, Any]:
        return super()._arguments(input_shape, channels) | {"axes": self._axes}


def _ones_and_zeros(dtype: DTypeLike) -> Initial:
    """Return how initial parameters are drawn: scales are 1, shifts 0."""
    checked = check_dtype(dtype)
    return lambda name, shape: partial(np.full, shape, name in ("weight", "running_var"), checked)


def _check_eps(eps: Any) -> float:
    value = check_number("eps", eps)
    if value < 0:
        raise InputError(f"eps is {short(eps)}; expected at least 0")
    return value
