"""Parameters of a simulation as one vector: a number, an array, or a dict or tuple of these."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InputError, InputTypeError, short
from .factors import Vector


class Params:
    """The structure of parameters.

    Parameters
    ----------
    params : float, array_like, dict, tuple or None
        Parameters; those in a dict or a tuple are numbers or arrays.

    Attributes
    ----------
    vector : ndarray of float64
        A copy of all their numbers, which functions of the user may read only.
    """

    def __init__(self, params: Any) -> None:
        self._kind: type | None = None
        names: list[Any] = []
        leaves: list[Any] = []
        if isinstance(params, dict):
            self._kind, names, leaves = dict, list(params), list(params.values())
        elif isinstance(params, tuple):
            self._kind, names, leaves = tuple, list(range(len(params))), list(params)
        elif params is not None:
            names, leaves = [""], [params]
        self._names = names
        arrays = [_array(self._title(name), leaf) for name, leaf in zip(names, leaves, strict=True)]
        self._shapes = [each.shape for each in arrays]
        self._is_number = [not hasattr(leaf, "shape") for leaf in leaves]
        self._ends = np.cumsum([0, *(each.size for each in arrays)]).tolist()
        self.vector = np.concatenate([each.reshape(-1) for each in arrays] or [np.empty(0)])
        self.vector.flags.writeable = False
        self._known = self.vector, self._cut(self.vector)

    @property
    def structure(self) -> tuple[Any, ...]:
        """What :meth:`of` depends on."""
        return self._kind, tuple(self._names), tuple(self._shapes), tuple(self._is_number)

    def _title(self, name: Any) -> str:
        return "params" if name == "" else f"params[{name!r}]"

    def slice_of(self, name: Any) -> slice:
        """Return where the numbers of a parameter are in the vector."""
        if name not in self._names:
            raise InputError(f"param_patterns has {name!r}; expected names among {self._names}")
        k = self._names.index(name)
        return slice(self._ends[k], self._ends[k + 1])

    def of(self, vector: Any, lead: tuple[int, ...] = ()) -> Any:
        """Return a vector's numbers, real or complex, in the structure of the parameters.

        `lead` are axes before those of each parameter.
        """
        known, pieces = self._known
        if vector is not known or lead:
            pieces = self._cut(vector, lead)
            if not lead and vector.dtype == np.float64:
                self._known = vector, pieces
        if self._kind is dict:
            return dict(zip(self._names, pieces, strict=True))
        if self._kind is tuple:
            return tuple(pieces)
        return pieces[0] if pieces else None

    def _cut(self, vector: Any, lead: tuple[int, ...] = ()) -> list[Any]:
        pieces = [
            vector[..., begin:end].reshape((*lead, *shape))
            for begin, end, shape in zip(self._ends, self._ends[1:], self._shapes, strict=False)
        ]
        if lead:
            return pieces
        return [
            piece[()] if is_number and not piece.shape else piece
            for piece, is_number in zip(pieces, self._is_number, strict=True)
        ]

    def vector_of(self, params: Any) -> Vector:
        """Return derivatives in this structure as one vector."""
        leaves = params
        if self._kind is dict:
            leaves = [params[name] for name in self._names]
        elif self._kind is None:
            leaves = [] if params is None else [params]
        rows = [
            np.asarray(leaf, np.float64).reshape(end - begin)
            for leaf, begin, end in zip(leaves, self._ends, self._ends[1:], strict=False)
        ]
        return np.concatenate(rows or [np.empty(0)])


def _array(name: str, leaf: Any) -> Vector:
    try:
        array = np.array(leaf, dtype=None)
    except ValueError as error:
        raise InputTypeError(f"{name} is {short(leaf)}; expected numbers") from error
    if array.dtype.kind not in "fiub":
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected real numbers")
    return array.astype(np.float64)
