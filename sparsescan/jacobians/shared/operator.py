"""The base class of all layers."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import numpy as np

from ...arrays.arrays import check_array, check_memory, namespace, output, read_array
from ...chains.containers import as_matrix
from ...chains.implicit import ImplicitStep
from ...errors import Allocating, InputError
from ...execution.sharing import even_slices, map_shared, quiet
from ...locks import cached_property
from ...parameters.fixed import Fixed
from ...parameters.parametrised import Layer
from ...symbolic.implicit import ImplicitPattern, Step
from ...symbolic.pattern import Pattern, block_diagonal, index_dtype
from .checks import Shape, batched, check_sizes

# For less work in nanoseconds, waking another thread takes longer than it saves.
_GRAIN = 200_000

Array = Any  # numpy.ndarray or cupy.ndarray


class Operator(Fixed, ABC):
    """A layer ``y = f(x; θ)`` and its transposed Jacobian ``(∂y/∂x)ᵀ``, sparse.

    Vectors are arrays of `input_shape` and `output_shape`, flattened in C order. A layer that reads
    only the last axes of its input, such as a convolution, repeats along all axes before them. Its
    Jacobian is then block diagonal.

    Attributes
    ----------
    input_shape, output_shape : tuple of int
        Shapes of one sample of ``x`` and ``y``.
    pattern : Pattern
        Where the transposed Jacobian may have nonzeros, whatever the input and the parameters.

    See Also
    --------
    sparsescan.jacobians.Sequential : Layers one after the other.
    """

    input_shape: Shape
    output_shape: Shape
    _core: Shape  # the last axes of the input, which the layer reads
    _core_out: Shape
    _blocks: int  # product of the axes before
    # Whether the values depend on the input; if not, all samples share them.
    _reads_input: bool = True
    # Whether the values of samples can be written separately, and roughly how long a value takes.
    _samples_apart = True
    # Whether values are computed without NumPy operations, which may warn.
    _is_compiled = False
    _nanoseconds = 0.1

    def _set_shapes(self, input_shape: Any, axes: int | None) -> None:
        """Set the shape of a sample; the layer reads its last `axes` axes, or all."""
        shape = check_sizes("input_shape", input_shape)
        axes = len(shape) if axes is None else axes
        if len(shape) < axes:
            raise InputError(f"input_shape is {shape}; expected at least {axes} axes")
        self.input_shape = shape
        self._core = shape[len(shape) - axes :]
        self._blocks = math.prod(shape[: len(shape) - axes])

    def _set_output(self, core: Shape) -> None:
        """Set the shape of the output for the axes that the layer reads."""
        self._core_out = core
        before = self.input_shape[: len(self.input_shape) - len(self._core)]
        self.output_shape = check_sizes("output_shape", (*before, *core))

    # -- Defined by each layer ------------------------------------------------------------------

    @abstractmethod
    def _core_nnz(self) -> int:
        """Return the entries of the pattern of one block, without building it."""

    @abstractmethod
    def _core_pattern(self) -> Pattern:
        """Build the pattern of one block."""

    @abstractmethod
    def _forward(self, xp: Any, x: Array) -> Array:
        """Compute the output ``(m, *core_out)`` for the input ``(m, *core)``."""

    @abstractmethod
    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        """Write the values of every block: `out` is ``(m, nnz)``, `x` is ``(m, *core)`` or None.

        `y` is the output for `x`, or None if it is not known. If the values do not depend on the
        input, `out` is ``(1, nnz)``.
        """

    def _implicit_pattern(self) -> ImplicitPattern | None:
        """Return factors to apply in place of the Jacobian; None if they save nothing."""
        return None

    def _implicit_values(self, x: Array, y: Array) -> list[Array]:
        """Return the values of these factors, for ``(*lead, *input_shape)`` of a checked input."""
        raise NotImplementedError

    # -- Public ---------------------------------------------------------------------------------

    @cached_property
    def nnz(self) -> int:
        """Entries of the pattern, counted without building it."""
        return self._blocks * self._core_nnz()

    @property
    def shape(self) -> tuple[int, int]:
        """Shape ``(inputs, outputs)`` of the transposed Jacobian."""
        return math.prod(self.input_shape), math.prod(self.output_shape)

    @cached_property
    @Allocating("the pattern")
    def pattern(self) -> Pattern:
        """Where the transposed Jacobian may have nonzeros; built when it is first read.

        Raises
        ------
        MemoryLimitError
            If it would take more memory than there is.
        """
        self._check_memory()
        return block_diagonal(self._core_pattern(), self._blocks)

    @cached_property
    @Allocating("the patterns of the factors")
    def implicit_pattern(self) -> Step:
        """Patterns of the factors of the transposed Jacobian, as an implicit step applies them.

        If factors save nothing, it is :attr:`pattern`, for explicit steps. A convolution has one
        factor, whose weights are read through an index. A normalisation or a softmax has a diagonal
        and the few sums that couple elements.

        Raises
        ------
        MemoryLimitError
            If they would take more memory than there is.
        """
        return self._implicit_pattern() or self.pattern

    @property
    def params(self) -> dict[str, Array]:
        """The parameters by their names, not copied; empty for most layers."""
        return {}

    @Allocating("the output")
    @quiet
    def forward(self, x: Array) -> Array:
        """Compute the output of the layer.

        Parameters
        ----------
        x : array_like of float32 or float64, shape ``input_shape`` or ``(batch, *input_shape)``
            The input, of NumPy or CuPy.

        Returns
        -------
        ndarray, shape ``output_shape`` or ``(batch, *output_shape)``
            The output.

        Raises
        ------
        InputError, InputTypeError
            If the shape or the dtype is wrong.
        DeviceError
            If input and parameters are on different devices.
        """
        x, lead = self._read("x", x, self.input_shape)
        xp = namespace(x, *self.params.values())
        y = self._forward(xp, x.reshape(-1, *self._core))
        return y.reshape((*lead, *self.output_shape))

    @Allocating("the values")
    def values(self, x: Array = None, y: Array = None, *, out: Array = None) -> Array:
        """Compute the values of the transposed Jacobian, in the order of the pattern.

        Parameters
        ----------
        x : array_like, shape ``input_shape`` or ``(batch, *input_shape)``
            The input. You may leave it out if the values do not depend on it.
        y : array_like, shape ``output_shape`` or ``(batch, *output_shape)``, optional
            The output for `x`, if you have it: some layers then compute less.
        out : ndarray, optional
            Where to write the values: a contiguous array of the returned shape and dtype, which
            shares no memory with other arguments.

        Returns
        -------
        ndarray, shape (nnz,) or (batch, nnz)
            One row for each sample, or one for all if the values do not depend on the input. The
            dtype is that to which `x` and the parameters promote; without any of them, that of
            `out`, or float64.

        Raises
        ------
        InputError, InputTypeError
            If a shape or a dtype is wrong.
        DeviceError
            If input, parameters and `out` are on different devices.
        MemoryLimitError
            If the values would take more memory than there is.
        """
        x, y, lead = self._read_pair(x, y)
        given = [array for array in (x, *self.params.values()) if array is not None]
        if given:
            xp, dtype = namespace(y, *given), np.result_type(*(array.dtype for array in given))
        else:
            xp = np if out is None else namespace(out)
            dtype = np.dtype(np.float64) if out is None else check_array("out", out).dtype
        shape = (*lead, self.nnz) if self._reads_input else (self.nnz,)
        apart = given if y is None else [y, *given]
        room = output(xp, out, shape, dtype, what=self, apart=apart)
        with nullcontext() if self._is_compiled else np.errstate(all="ignore"):
            if room.size == 0:
                pass
            elif self._reads_input:
                self._fill_samples(xp, x, y, room)
            else:
                rows = room.reshape(self._blocks, -1)
                self._fill(xp, None, None, rows[:1])
                rows[1:] = rows[:1]
        return room if out is None else out

    def _fill_samples(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        """Write values that depend on the input; threads share the samples if there are many."""
        x = x.reshape(-1, *self._core)
        y = None if y is None else y.reshape(-1, *self._core_out)
        rows = out.reshape(len(x), -1)
        threads_help = out.size * self._nanoseconds >= 2 * _GRAIN and self._samples_apart
        if xp is not np or not threads_help:
            self._fill(xp, x, y, rows)
            return

        def fill(part: slice) -> None:
            self._fill(np, x[part], None if y is None else y[part], rows[part])

        count = min(len(rows), int(out.size * self._nanoseconds / _GRAIN))
        map_shared(fill, even_slices(len(rows), count))

    def jacobian(self, x: Array = None, y: Array = None) -> Any:
        """Return the transposed Jacobian ``(∂y/∂x)ᵀ``.

        Parameters
        ----------
        x, y
            As for :meth:`values`.

        Returns
        -------
        csr_array or BatchedCSR, shape (inputs, outputs)
            A BatchedCSR if `x` is a batch and the values depend on it; else a SciPy array, or a
            CuPy array if the values are on a device. It shares the index arrays of the pattern, so
            do not write to them: copy the array to change its structure.

        Raises
        ------
        InputError, InputTypeError, DeviceError, MemoryLimitError
            As :meth:`values`.
        """
        return as_matrix(self.values(x, y), self.pattern)

    @Allocating("the values")
    @quiet
    def implicit(self, x: Array = None, y: Array = None) -> Any:
        """Return the transposed Jacobian as a step of :attr:`implicit_pattern`.

        Parameters
        ----------
        x, y
            As for :meth:`values`.

        Returns
        -------
        ImplicitStep, csr_array or BatchedCSR
            An ImplicitStep if the pattern is an ImplicitPattern; else the result of
            :meth:`jacobian`. Weights are not copied: a scan reads their current values.

        Raises
        ------
        InputError, InputTypeError, DeviceError, MemoryLimitError
            As :meth:`values`.

        Examples
        --------
        >>> import numpy as np, sparsescan
        >>> from sparsescan.jacobians import Conv2d
        >>> conv = Conv2d(3, 64, 3, padding=1, input_shape=(3, 32, 32), rng=0)
        >>> step = conv.implicit()
        >>> step.values[0].size, conv.nnz
        (1728, 1696512)
        >>> grad = np.ones((64 * 32 * 32), np.float32)
        >>> sparsescan.inclusive_scan(grad, [step])[1].shape
        (3072,)
        """
        pattern = self.implicit_pattern
        if not isinstance(pattern, ImplicitPattern):
            return self.jacobian(x, y)
        x, y, _ = self._read_pair(x, y)
        return ImplicitStep(self._implicit_values(x, y), pattern)

    @Allocating("the gradients of the parameters")
    @quiet
    def param_grads(self, x: Array, grad_y: Array) -> dict[str, Array]:
        """Return the gradients of the loss in the parameters, summed over the batch.

        ``∇θ = (∂y/∂θ)ᵀ ∇y``: equation 2 of BPPSA (MLSys 2020), which needs no other layer.

        Parameters
        ----------
        x : array_like, shape ``input_shape`` or ``(batch, *input_shape)``
            The input.
        grad_y : array_like, shape output_shape or (d,), or the same after a batch axis
            Gradient in the output, in the form of a scan's result or in the shape of the output.

        Returns
        -------
        dict of str to ndarray
            The gradient of each parameter in :attr:`params`, in its shape.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`.
        """
        x, lead = self._read("x", x, self.input_shape)
        grad_y = read_array("grad_y", grad_y)
        allowed = [(*lead, *self.output_shape), (*lead, math.prod(self.output_shape))]
        if grad_y.shape not in allowed:
            raise InputError(
                f"grad_y has shape {grad_y.shape}; expected {allowed[0]} or {allowed[1]}, as x has "
                f"shape {x.shape}"
            )
        xp = namespace(x, grad_y, *self.params.values())
        if not self.params:
            return {}
        return self._param_grads(
            xp, x.reshape(-1, *self._core), grad_y.reshape(-1, *self._core_out)
        )

    def restrict(
        self, input_shape: Any, channels: slice = slice(None), **arguments: Any
    ) -> Operator:
        """Return this layer for a part of its input, or for some of its output channels.

        If several workers share a layer, this is the work of one of them. The part has the
        arguments of this layer, and views of its parameters.

        Parameters
        ----------
        input_shape : tuple of int
            Shape of the part of a sample that the new layer reads.
        channels : slice
            Output channels that it computes, if the layer has parameters for each channel.
        **arguments
            Arguments of the layer to change, such as ``padding=0`` if the part already contains the
            surrounding elements.

        Returns
        -------
        Operator
            A layer of the same class.

        Raises
        ------
        InputError, InputTypeError
            If the layer cannot be restricted in this way.

        Examples
        --------
        >>> from sparsescan.jacobians import Conv2d, MaxPool2d
        >>> conv = Conv2d(3, 8, 3, padding=1, input_shape=(3, 6, 6), rng=0)
        >>> upper = conv.restrict((3, 4, 6), padding=(0, 1))  # the two middle rows
        >>> half = conv.restrict((3, 6, 6), slice(4))
        >>> upper.output_shape, half.output_shape, half.weight.base is conv.weight
        ((8, 2, 6), (4, 6, 6), True)
        >>> MaxPool2d(2, input_shape=(3, 6, 6)).restrict((1, 4, 6)).output_shape
        (1, 2, 3)
        """
        kind: Any = type(self)
        own = self._arguments(input_shape, channels)
        part: Operator = kind(**own | arguments, input_shape=input_shape)
        return self.share_parameters(part, channels)

    def _arguments(self, input_shape: Shape, channels: slice) -> dict[str, Any]:
        """Return the arguments of a part of this layer, without its input shape."""
        if channels != slice(None):
            raise InputError(f"channels is {channels}; {self!r} has no parameters for each of them")
        names = inspect.signature(type(self)).parameters.keys() - {"input_shape"}
        return {name: getattr(self, name) for name in names}

    def share_parameters(self, part: Layer, channels: slice) -> Layer:
        """Let `part` share this layer's parameters (here it has none), and return it."""
        return part

    def _param_grads(self, xp: Any, x: Array, grad_y: Array) -> dict[str, Array]:
        """Return the gradients for input ``(m, *core)`` and gradients ``(m, *core_out)``."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.input_shape} → {self.output_shape}, nnz={self.nnz})"

    def _read(self, name: str, array: Any, shape: Shape) -> tuple[Array, Shape]:
        """Return an array of samples, and the shape of the axes before a sample's."""
        array = read_array(name, array)
        if array.shape == shape:
            return array, ()
        if array.shape[1:] == shape and array.ndim == len(shape) + 1:
            return array, array.shape[:1]
        raise InputError(f"{name} has shape {array.shape}; expected {shape} or {batched(shape)}")

    def _read_pair(self, x: Any, y: Any) -> tuple[Array, Array, Shape]:
        """Return the given input and output, and the shape of the axes before a sample's."""
        lead: Shape = ()
        if x is not None:
            x, lead = self._read("x", x, self.input_shape)
        elif self._reads_input:
            raise InputError(f"x is None; the values of {self!r} depend on it")
        if y is not None:
            y, y_lead = self._read("y", y, self.output_shape)
            if x is not None and y_lead != lead:
                raise InputError(
                    f"y has shape {y.shape}; expected {(*lead, *self.output_shape)}, as x has "
                    f"shape {x.shape}"
                )
        return x, y, lead

    def _check_memory(self) -> None:
        rows, cols = self.shape
        size = index_dtype((rows, cols), self.nnz).itemsize
        # Diagonal and dense patterns keep no index arrays.
        if self.nnz != rows * cols:
            check_memory(f"the pattern of {self!r}", (self.nnz + rows + 1) * size)
