"""The exceptions a caller can catch; each derives from the built-in exception that fits."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Characters of a value that an error message shows.
_SHOWN = 100

# How NumPy's errors begin where an array would not fit into any address space.
_TOO_LARGE = ("array is too big", "Maximum allowed", "maximum supported dimension")

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN


class SparseScanError(Exception):
    """Base class of every exception that this package raises on purpose.

    From Python 3.11 on, a traceback says below the message where the usual causes are listed.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        kind = type(self)
        self.__notes__ = [f"For usual causes see help({kind.__module__}.{kind.__qualname__})."]


class InputError(SparseScanError, ValueError):
    """An argument has the right type but a wrong shape, index, size or value.

    Notes
    -----
    The usual causes:

    - Jacobians are in the order of time. Pass ``reverse=True``, or list them from the last layer
      to the first.
    - Jacobians are not transposed: ``J_i`` has shape ``(d_{i-1}, d_i)``, so that it takes the
      gradient of a layer's output to that of its input.
    - Arrays have a batch axis in one place and none, or one of another length, in another.
    - ``local_grads`` has an entry for ``∇x_0``, which an exclusive scan does not return.
    - Sequences have their axes in another order: arrays are ``(T, batch, features)``, also those of
      gradients; only modules of :mod:`sparsescan.torch` have ``batch_first``.
    - A plan was made for another number of Jacobians, or a :class:`Schedule`. A string such as
      ``"truncated:2"`` fits any number.
    """


class InputTypeError(SparseScanError, TypeError):
    """An argument has a type, a sparse format or a dtype that is not supported.

    Notes
    -----
    The usual causes:

    - A sparse array has another format than CSR. ``.tocsr()`` converts it; the transpose of a CSR
      array is a CSC array.
    - Integers, booleans, complex numbers or float16. ``.astype(float)`` makes float64 of them,
      or the real parts of complex numbers.
    - A tensor of PyTorch that requires a gradient. ``.detach()`` it, or use
      :mod:`sparsescan.torch`, whose functions have gradients.
    - One Jacobian stands where a list of them is expected, or shapes where arrays are expected.
    - A class stands where an object of it is expected, or the other way round.
    - A cell's step calls what works on numbers, such as ``if``, functions of PyTorch, or NumPy's
      sums. It runs on symbols: NumPy's functions of one number a unit work on them, and those of
      :mod:`sparsescan.recurrent`.
    """


class GradientError(InputError):
    """A gradient is wrong for the function that it was checked against, or cannot be determined.

    Notes
    -----
    The usual causes (the message names the one that fits):

    - Jacobians are not transposed. Square ones pass every check of shapes.
    - Jacobians are in the order of time. Pass ``reverse=True``, or list them from the last layer
      to the first.
    - The gradient in the last output is both in ``grad`` and in ``local_grads``, so it counts
      twice.
    - Jacobians were computed at other states than those that the function runs through.
    - The pattern of a simulation lacks an entry.
    - The function of a simulation jumps, or its rounding hides a derivative. Pass functions that
      return derivatives, or a JAX function with ``derivatives="jax"``: neither needs differences.
    """


class PatternMismatchError(InputError):
    """A Jacobian given to a plan has another pattern than the plan was made for.

    Notes
    -----
    A pattern says where values may be nonzero, and holds for all iterations. The usual causes:

    - Zeros are dropped, so that the pattern follows the values. A conversion from a dense array and
      ``eliminate_zeros()`` drop zeros. Keep explicit zeros, or take the pattern of the layer.
    - Weights were pruned after the plan was made. Make a plan for the new patterns.
    - Steps are implicit in the plan and explicit in the call, or the other way round.
    """


class SingularMatrixError(InputError, np.linalg.LinAlgError):
    """A matrix that a scan has to solve with is singular.

    Notes
    -----
    The usual causes:

    - A time step hits an eigenvalue: ``I - Δ L`` is singular where ``1/Δ`` is one of ``L``'s.
    - Boundary conditions fix a solution up to a constant only, as pure Neumann conditions do.
    - A row or a column has no nonzeros, because an unknown takes part in no equation.
    """


class NewtonError(SparseScanError, ArithmeticError):
    """Newton's method found no solution of a step of a simulation, or its adjoint has none.

    Attributes
    ----------
    run : Run
        The simulation, with the states before that step. Other exceptions that end a simulation,
        such as :class:`KeyboardInterrupt`, have this attribute too.

    Notes
    -----
    The usual causes:

    - The step is too long. Halve ``dt``, at least there.
    - The Jacobian's pattern lacks entries, or the function that returns it is wrong:
      ``forward(…, check=True)`` says which.
    - The equations have no solution, or no smooth one: a square root of a negative number, a value
      that is not finite.
    """


class FileError(InputError):
    """A file is no chain of :func:`sparsescan.save_chain`, or no plan of ``ScanPlan.save``.

    Notes
    -----
    The usual causes: the file was cut off while it was copied or written, or was changed (arrays
    have checksums); it is an ``.npz`` file of another program or another version of the format; or
    it holds a plan in place of a chain. The page on file formats lists the keys. A plan can be made
    again from its patterns, and saved.
    """


class DeviceError(SparseScanError, RuntimeError):
    """The device that was asked for, or that holds the data, cannot be used here.

    Notes
    -----
    The usual causes:

    - CuPy or Numba's CUDA target is not installed: ``sparsescan[cuda13]`` has both, and
      ``[cuda12]`` for older drivers. ``sparsescan info`` prints what is found.
    - Some arrays are in host memory and some on the device. ``cupy.asarray`` and
      ``cupy.asnumpy`` move them.
    - The call runs on the CPU only, like scans with a :class:`~sparsescan.SolveStep` and training
      steps of a :class:`~sparsescan.jacobians.Sequential`. The page of promises has a table of what
      runs where.
    """


class MemoryLimitError(SparseScanError, MemoryError):
    """A call needs more memory than it may take, or than there is.

    Notes
    -----
    The usual causes:

    - Products fill in: the product of a few sparse Jacobians may be dense. ``print(plan)`` shows
      the fill-in of every level. ``schedule="linear"`` makes no products, ``"truncated:K"`` makes
      few.
    - Jacobians are written out for all steps and samples. Implicit steps, or the training step of
      a network, take far less.
    - ``memory_limit`` is below the minimum that the message names. Raise it, or scan fewer samples
      at once.
    - Gradients of all steps and samples are more than the machine has. A plan for fewer samples
      runs several times.
    - The chain is too large for one machine. :mod:`sparsescan.parallel` shares it.
    """


class RankError(SparseScanError, RuntimeError):
    """One of the ranks of :mod:`sparsescan.parallel` ended with an exception of another kind.

    Notes
    -----
    All ranks raise it, so that none waits for ever. The message names the rank and its exception,
    and the traceback of that rank shows the cause. The usual causes are a file that a rank cannot
    read or write, and a bug in an object that a rank passes.
    """


def short(value: object) -> str:
    """Return how an error message shows a value: on one line, however large the value is."""
    try:
        text = " ".join(_repr.repr(value).split())
    except Exception:  # of the repr of a caller's own class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


class Allocating:
    """Turn a lack of memory in a block or a call into a :class:`MemoryLimitError` that names it.

    Parameters
    ----------
    what : str
        The subject of the message, such as ``"the scan"``.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Return the function with its whole call as the block."""

        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except (MemoryError, ValueError) as error:
                self.__exit__(type(error), error, None)
                raise

        return call

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lacking = isinstance(error, MemoryError) and not isinstance(error, MemoryLimitError)
        if lacking or (isinstance(error, ValueError) and str(error).startswith(_TOO_LARGE)):
            raise out_of_memory(self._what, error) from None


def out_of_memory(what: str, error: BaseException | None) -> MemoryLimitError:
    """Return an error that says what a lack of memory has stopped; `error` itself if it does so."""
    if isinstance(error, MemoryLimitError):
        return error
    # NumPy says how many bytes it has asked for.
    needed = str(error) or "the system gave it none"
    return MemoryLimitError(f"{what} needs more memory than there is: {needed}")
