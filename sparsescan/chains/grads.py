"""The caller's gradients: the one at the end of the chain, and the local gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import arrays as _arrays
from ..arrays.addresses import is_aligned, kernel_address
from ..arrays.arrays import check_one_place, contiguous, device_of, is_on_device, read_array
from ..errors import InputError, InputTypeError
from .chain import Chain
from .reading import items_of, length_of

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def read_grad(grad: Any, size: int | None, batch: int | None) -> Any:
    """Return the gradient at the end of the chain, shape ``(size,)`` or ``(batch, size)``."""
    array = _arrays.check_array("grad", grad)
    check_grad(array, size, batch)
    return array


def check_grad(array: Any, size: int | None, batch: int | None) -> None:
    """Raise unless an array has the shape of the gradient at the end of the chain."""
    wanted = "d_n" if size is None else str(size)
    if batch is not None:
        if array.ndim != 2 or array.shape != (batch, array.shape[1] if size is None else size):
            raise InputError(
                f"grad has shape {array.shape}; expected ({batch}, {wanted}): the Jacobians have a "
                f"batch of {batch} and {wanted} columns"
            )
    elif array.ndim not in (1, 2) or size not in (None, array.shape[-1]):
        why = "" if size is None else f": the last layer's Jacobian, transposed, has {size} columns"
        raise InputError(
            f"grad has shape {array.shape}; expected ({wanted},) or (batch, {wanted}){why}"
        )


def placed(grad: Any, local_grads: Any) -> tuple[str, Any]:
    """Return the name and the array of some input that lies where a scan runs: `grad` if given."""
    return ("grad", grad) if grad is not None else _first_given(local_grads)


def grad_or_zeros(
    grad: Any, local_grads: Any, size: int | None, batch: int | None, period: int = 0
) -> Any:
    """Return `grad` as an array, or zeros for each sample if it is None.

    `batch` is that of the chain, None if samples share it; `period` is as for :class:`LocalGrads`.
    """
    if grad is not None:
        return read_array("grad", grad)
    name, given = _first_given(local_grads)
    given = read_array(name, given)
    # Without the axis of steps, where gradients of many came as one array.
    shape = given.shape[(name == "local_grads") + (period > 1) :]
    samples = shape[:-1] if batch is None else (batch,)
    size = shape[-1] if size is None and shape else size
    with _arrays.beside(given):
        return _arrays.namespace(given).zeros((*samples[:1], size or 0), _FLOAT32)


def _first_given(local_grads: Any) -> tuple[str, Any]:
    """Return the name and the first local gradient that is not None; or the array of all."""
    if isinstance(local_grads, np.ndarray) or is_on_device(local_grads):
        return "local_grads", local_grads
    if local_grads is not None:
        _check_sequence(local_grads)
        try:
            for k, given in enumerate(local_grads):
                if given is not None:
                    return f"local_grads[{k}]", given
        except Exception as error:  # of a caller's own class
            raise InputTypeError(f"local_grads cannot be read: {error}") from None
    raise InputError(
        "grad is None, and local_grads has no gradient either; expected the gradient at the end of "
        "the chain, or local gradients that say what shape its zeros have"
    )


def check_places(grad: Any, chain: Chain, local: LocalGrads) -> int | None:
    """Return the device that has all input of a scan, None for host memory; else raise."""
    device = device_of(grad)
    if chain.n:
        check_one_place("grad", device, "jacobians", chain.device)
    if local.given:
        check_one_place("local_grads", local.device, "grad", device)
    return device


class LocalGrads:
    """Local gradients, checked: a scan adds them to the gradients that it returns.

    Parameters
    ----------
    local_grads : None or sequence or array
        None, or for each returned gradient None or an array of its shape.
    count : int
        Number of returned gradients.
    sizes : sequence of int
        Length of each; there may be more lengths than gradients.
    batch_shape : tuple of int or None
        ``()`` or ``(batch,)``; None if :meth:`check` is called when it is known.
    period : int
        If more than 1, `local_grads` has one array or None for each of `period` patterns.
    reverse : bool
        Whether they come in the order of time.

    Attributes
    ----------
    given : bool
        Whether there is anything to add.
    dtypes : set of dtype
        The dtypes of the arrays.
    device : int or None
        The CUDA device that has them; None for host memory.
    """

    def __init__(
        self,
        local_grads: Any,
        count: int,
        sizes: Sequence[int],
        batch_shape: tuple[int, ...] | None,
        period: int = 0,
        *,
        reverse: bool = False,
    ) -> None:
        self._count, self._reverse = count, reverse
        # What was passed: an array or None for each gradient; or, if they are stacked, for each of
        # a few turns, with an axis for the gradients of that turn.
        self._arrays: list[Any] = []
        self._stacked = False
        self.device: int | None = None
        if local_grads is not None:
            self._read(local_grads, period)
        self.dtypes = {array.dtype for array in self._arrays if array is not None}
        self.given = bool(self.dtypes)
        if self.given and batch_shape is not None:
            self.check(sizes, batch_shape)

    def _read(self, local_grads: Any, period: int) -> None:
        count = self._count
        is_array = isinstance(local_grads, np.ndarray)
        if type(local_grads) is not np.ndarray and is_on_device(local_grads):
            local_grads, is_array = _arrays.on_device(local_grads, "local_grads"), True
        if self._reverse:
            if not is_array or local_grads.ndim == 0:
                local_grads = _read_entries(local_grads, count)
            local_grads = local_grads[::-1]
        if period <= 1 and count and is_array and local_grads.dtype in (_FLOAT32, _FLOAT64):
            stack = read_array("local_grads", local_grads)
            _check_count(stack, count)
            self._arrays, self._stacked, self.device = [stack], True, device_of(stack)
            return
        self._stacked = period > 1
        first, arrays = -1, self._arrays
        for k, array in enumerate(
            _read_entries(local_grads, period, "pattern")
            if self._stacked
            else _read_entries(local_grads, count)
        ):
            if array is not None:
                array = read_array(self._name(k), array)
                device = None if type(array) is np.ndarray else device_of(array)
                if first < 0:
                    first, self.device = k, device
                elif device != self.device:
                    check_one_place(self._name(k), device, self._name(first), self.device)
            arrays.append(array)

    def check(self, sizes: Sequence[int], batch_shape: tuple[int, ...]) -> None:
        """Raise unless the gradients have these lengths, and so many samples."""
        sizes, arrays = sizes[: self._count], self._arrays
        if self._stacked and len(arrays) > 1:
            for turn, stack in enumerate(arrays):
                own = sizes[turn :: len(arrays)]
                if stack is not None and stack.shape != (len(own), *batch_shape, *own[:1]):
                    raise InputError(
                        f"local_grads[{turn}] has shape {stack.shape}; expected "
                        f"{(len(own), *batch_shape, *own[:1])}, the shape of the gradients it is "
                        "added to"
                    )
            return
        if self._stacked:
            # Where all lengths are alike there is one to look at.
            sizes = sizes if len(set(sizes)) > 1 else sizes[:1]
            arrays = arrays * len(sizes)
        for k, (array, size) in enumerate(zip(arrays, sizes, strict=False)):
            shape = None if array is None else array.shape[self._stacked :]
            if shape is not None and shape != (*batch_shape, size):
                raise InputError(
                    f"{self._name(k)} has shape {shape}; expected {(*batch_shape, size)}, the "
                    "shape of the gradient it is added to"
                )

    def _name(self, k: int) -> str:
        """Return the name of the `k`-th gradient in errors, in the caller's order."""
        return f"local_grads[{self._count - 1 - k if self._reverse else k}]"

    @property
    def stack(self) -> tuple[int, int] | None:
        """Return the first address and the bytes to the next, if they came as one array; else None.

        Only for contiguous gradients, as :meth:`convert` makes them.
        """
        if not self._stacked or len(self._arrays) != 1:
            return None
        return kernel_address(self._arrays[0], 1), self._arrays[0].strides[0]

    def add_first(self, grad: Any, out: Any) -> None:
        """Write the first gradient, with what is added to it, to `out`."""
        out[...] = grad
        first = self._arrays[0] if self.given else None
        if first is not None:
            first = first[0] if self._stacked else first
            with np.errstate(over="ignore", invalid="ignore"):
                out += first

    def spread(self, places: NDArray[np.int64], period: int = 0) -> None:
        """Place these gradients among more, at `places`; the others are None.

        If the gradients of one turn of so many are in one array, it is that of the first turn.
        """
        if self._stacked and period > 1:
            self._arrays += [None] * (period - 1)
        elif self._arrays:
            given = self._arrays[0] if self._stacked else self._arrays
            self._arrays, self._stacked = [None] * (int(places[-1]) + 1), False
            for place, array in zip(places.tolist(), given, strict=True):
                self._arrays[place] = array

    def array(self, k: int) -> Any:
        """Return what is added to the `k`-th gradient; None if nothing is."""
        if not self._stacked:
            return self._arrays[k] if k < len(self._arrays) else None
        step, turn = divmod(k, len(self._arrays))
        stack = self._arrays[turn]
        return None if stack is None else stack[step]

    def convert(self, dtype: np.dtype[Any]) -> None:
        """Make all of `dtype`, and each contiguous and aligned."""
        for k, array in enumerate(self._arrays):
            if array is not None:
                one = array[:1] if self._stacked else array
                if array.dtype != dtype or not (one.flags.c_contiguous and is_aligned(array)):
                    self._arrays[k] = contiguous(array, dtype)

    def upload(self) -> None:
        """Copy what is in host memory to the current device: a list in one transfer."""
        if not self.given:
            return
        if self._stacked:
            self._arrays = [None if each is None else _arrays.upload(each) for each in self._arrays]
        else:
            self._arrays = _arrays.upload_all(self._arrays, np.result_type(*self.dtypes))
        self.device = next(device_of(array) for array in self._arrays if array is not None)

    def fill(self, addresses: NDArray[np.int64]) -> None:
        """Write the address of each array, or 0."""
        if not self.given:
            return
        addresses[:] = 0
        for k, array in enumerate(self._arrays):
            if array is None:
                continue
            if self._stacked:
                own = addresses[k :: len(self._arrays)][: len(array)]
                own[:] = kernel_address(array, 1) + array.strides[0] * np.arange(len(array))
            else:
                addresses[k] = kernel_address(array)


def _read_entries(local_grads: Any, count: int, of: str = "returned gradient") -> list[Any]:
    """Return the entries of a sequence of local gradients, as many as are expected."""
    _check_count(local_grads, count, of)
    return items_of("local_grads", local_grads, count, "entries")


def _check_count(local_grads: Any, count: int, of: str = "returned gradient") -> None:
    _check_sequence(local_grads)
    length = length_of("local_grads", local_grads)
    if length != count:
        more = ": that of ∇x_0 is for inclusive_scan" if length == count + 1 else ""
        raise InputError(
            f"local_grads has {length} entries; expected {count}, one for each {of}{more}"
        )


def _check_sequence(local_grads: Any) -> None:
    _arrays.check_no_mask("local_grads", local_grads)
    if (
        not (isinstance(local_grads, (Sequence, np.ndarray)) or is_on_device(local_grads))
        or isinstance(local_grads, (str, bytes))
        or getattr(local_grads, "shape", None) == ()
    ):
        raise InputTypeError(
            f"local_grads is a {type(local_grads).__name__}; expected a sequence of arrays or None"
        )
