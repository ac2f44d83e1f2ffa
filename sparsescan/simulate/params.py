"""Turn parameters (a number, an array, or a dict or tuple of these) into one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, InputTypeError, short
from .factors import Vector


class Leaves(NamedTuple):
    """The parameters as a flat list.

    Attributes
    ----------
    kind : type or None
        The container: a dict or a tuple; None for one parameter or none.
    names : list
        Their names or places in the container, or ``[""]``.
    leaves : list
        The parameters.
    """

    kind: type | None
    names: list[Any]
    leaves: list[Any]

    @classmethod
    def of(cls, params: Any) -> Leaves:
        """Flatten parameters."""
        if isinstance(params, dict):
            return cls(dict, list(params), list(params.values()))
        if isinstance(params, tuple):
            return cls(tuple, list(range(len(params))), list(params))
        return cls(None, [], []) if params is None else cls(None, [""], [params])

    def joined(self, leaves: Sequence[Any]) -> Any:
        """Return other leaves in the same container."""
        if self.kind is dict:
            return dict(zip(self.names, leaves, strict=True))
        if self.kind is tuple:
            return tuple(leaves)
        return leaves[0] if leaves else None

    @property
    def titles(self) -> list[str]:
        """The names of the parameters in errors."""
        return ["params" if name == "" else f"params[{name!r}]" for name in self.names]


class Params:
    """The structure of parameters.

    Parameters
    ----------
    params : float, array_like, dict, tuple or None
        Parameters; those in a dict or a tuple are numbers or arrays.

    Attributes
    ----------
    vector : ndarray of float64
        A read-only copy of all their numbers.
    """

    def __init__(self, params: Any) -> None:
        own = Leaves.of(params)
        leaves = own.leaves
        arrays = [_array(*each) for each in zip(own.titles, leaves, strict=True)]
        self._own, self._names = own._replace(leaves=[]), own.names
        self._shapes = [each.shape for each in arrays]
        self._is_number = [not hasattr(leaf, "shape") for leaf in leaves]
        self._ends = np.cumsum([0, *(each.size for each in arrays)]).tolist()
        self.vector = np.concatenate([each.reshape(-1) for each in arrays] or [np.empty(0)])
        self.vector.flags.writeable = False
        self._known = self.vector, self._cut(self.vector)

    @property
    def structure(self) -> tuple[Any, ...]:
        """A key: parameters of the same structure have the same key."""
        return self._own.kind, tuple(self._names), tuple(self._shapes), tuple(self._is_number)

    @property
    def told(self) -> str:
        """The end of an error message about the parameters; empty if there are none."""
        if not len(self.vector):
            return ""
        leaves = [leaf.tolist() for leaf in self._cut(self.vector)]
        return f", params={short(self._own.joined(leaves))}"

    def title_of(self, place: int) -> str:
        """Return the name in errors of a number of the vector."""
        k = int(np.searchsorted(self._ends, place, side="right")) - 1
        shape, title = self._shapes[k], self._own.titles[k]
        if not shape:
            return title
        places = np.unravel_index(place - self._ends[k], shape)
        return f"{title}[{', '.join(map(str, places))}]"

    def slice_of(self, name: Any) -> slice:
        """Return the slice of a parameter in the vector."""
        if name not in self._names:
            raise InputError(f"param_patterns has {name!r}; expected names among {self._names}")
        k = self._names.index(name)
        return slice(self._ends[k], self._ends[k + 1])

    def of(self, vector: Any, lead: tuple[int, ...] = ()) -> Any:
        """Return the numbers of a vector, real or complex, in the structure of the parameters.

        `lead` are axes before those of each parameter.
        """
        known, pieces = self._known
        if vector is not known or lead:
            pieces = self._cut(vector, lead)
            if not lead and isinstance(vector, np.ndarray) and vector.dtype == np.float64:
                self._known = vector, pieces
        return self._own.joined(pieces)

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
        if self._own.kind is dict:
            leaves = [params[name] for name in self._names]
        elif self._own.kind is None:
            leaves = [] if params is None else [params]
        rows = [
            np.asarray(leaf, np.float64).reshape(end - begin)
            for leaf, begin, end in zip(leaves, self._ends, self._ends[1:], strict=False)
        ]
        return np.concatenate(rows or [np.empty(0)])


def read_array(name: str, given: Any) -> NDArray[Any]:
    """Return a copy of numbers as an array of any dtype."""
    try:
        return np.array(given)
    except Exception as error:  # ragged, or what a class of the caller raises
        raise InputTypeError(f"{name} is {short(given)}; expected numbers") from error


def _array(name: str, leaf: Any) -> Vector:
    array = read_array(name, leaf)
    if array.dtype.kind not in "fiub":
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected real numbers")
    return array.astype(np.float64)
