"""Check the arguments of recurrent networks, in arrays of any package, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from numpy.typing import NDArray

from ..checks import check_choice, check_count_or_none, check_flag, check_has_shape
from ..errors import InputError, InputTypeError, short
from .definition import Layers

Shape = tuple[int, ...]
Returned = bool | Literal["layers"]


class OptionsDict(TypedDict, total=False):
    """The :class:`Options` as arguments, for type checkers."""

    memory_limit: int | None
    truncate: int | None
    return_states: Returned


class Options(NamedTuple):
    """The options of a network, for NumPy, PyTorch and JAX: all arguments other than arrays.

    This is the only list of options: constructors, attributes and operators follow from it.
    :class:`~sparsescan.recurrent.TrainingStep` says what each option does.

    Attributes
    ----------
    memory_limit : int or None
        Bytes that may be kept for the backward pass.
    truncate : int or None
        Steps of a segment; gradients flow at most to the previous segment.
    return_states : bool or "layers"
        Whether outputs are all states of the last layer, or those of all layers.
    """

    memory_limit: int | None = None
    truncate: int | None = None
    return_states: Returned = False

    @classmethod
    def taken_from(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Remove the options from keyword arguments, and return them."""
        return {name: given.pop(name) for name in cls._fields if name in given}

    @classmethod
    def read(cls, network: Layers, given: Mapping[str, Any]) -> Options:
        """Return the options of a network, checked."""
        if unknown := sorted(set(given) - set(cls._fields)):
            raise TypeError(f"{unknown[0]} is no option; expected one of {', '.join(cls._fields)}")
        options = cls(**{name: check_option(name, value) for name, value in given.items()})
        if options.truncate is not None and len(network.cells[0]) > 1:
            raise InputError(
                f"truncate is {options.truncate}, and the network has two directions; expected "
                "None, or one direction: segments of both would not be the same"
            )
        return options

    @property
    def is_bounded(self) -> bool:
        """Whether the memory or the reach of the backward pass is limited."""
        return self.memory_limit is not None or self.truncate is not None

    def unbounded(self) -> Options:
        """Return the options for a call without a backward pass."""
        return self._replace(memory_limit=None, truncate=None)

    def of_cells(self, states: int) -> Options:
        """Return the options for cells of some states: with one state, all states are the first."""
        is_first = states == 1 and self.return_states is True
        return self._replace(return_states=False) if is_first else self

    def of_layer(self, *, is_last: bool) -> Options:
        """Return the options for one layer of a network; all states if the network reads them."""
        is_read = self.return_states == "layers" or (is_last and self.return_states)
        return self._replace(return_states=bool(is_read))

    def encode(self) -> list[int]:
        """Return integers that encode the options."""
        limits = (-1 if each is None else each for each in (self.memory_limit, self.truncate))
        return [*limits, _RETURNED.index(self.return_states)]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Options:
        """Return the options that integers encode."""
        limit, truncate = (None if each < 0 else each for each in numbers[:2])
        return cls(limit, truncate, _RETURNED[numbers[2]])


DEFAULTS = Options()
# The values of `return_states`; the place of a value is its code.
_RETURNED: tuple[Returned, ...] = (False, True, "layers")


def check_option(name: str, value: Any) -> Any:
    """Check and return the value of one of the :class:`Options`."""
    if name == "return_states":
        is_text = isinstance(value, str)
        return check_choice(name, value, "layers") if is_text else check_flag(name, value)
    return check_count_or_none(name, value, 1 if name == "truncate" else 0)


def check_input(name: str, x: Any, size: int, *axes: str) -> None:
    """Raise unless an input has the axes that one of the texts names, then `size` numbers."""
    has_axes = any(names.count(",") + 2 == len(x.shape) for names in axes)
    if not has_axes or x.shape[-1] != size:
        expected = " or ".join(f"({names}, {size})" for names in axes)
        raise InputError(f"{name} has shape {tuple(x.shape)}; expected {expected}")


def check_state(state: Any, shape: Shape, x: Any, name: str = "state") -> None:
    """Raise unless states have the shape that the network and the input determine."""
    check_has_shape(name, state, shape, f", as x has shape {x.shape}")


def check_lengths(lengths: Any, shape: Shape) -> None:
    """Raise unless lengths are integers, one for each sample."""
    if lengths.dtype.kind not in "iu":
        raise InputTypeError(f"lengths has dtype {lengths.dtype}; expected integers")
    check_has_shape("lengths", lengths, shape, ", one for a sample")


def check_length_range(lengths: NDArray[Any], steps: int) -> None:
    """Raise unless lengths are from 0 to the number of steps."""
    if lengths.size and not (lengths.min() >= 0 and lengths.max() <= steps):
        raise InputError(
            f"lengths is {short(lengths.tolist())}; expected integers from 0 to {steps}"
        )


def check_has_resets(resets: Any) -> None:
    """Raise if a call has `reset_states` but no `resets`."""
    if resets is None:
        raise InputError("reset_states is given, and resets is None; expected both, or neither")


def check_resets(resets: Any, x: Any, names: tuple[str, str] = ("resets", "x")) -> Any:
    """Return resets without a last axis of 1, as bools for each step, or each step and sample.

    `names` are the names of the resets and of the input in errors.
    """
    name, of = names
    if resets.dtype != bool and str(resets.dtype) != "torch.bool":
        raise InputTypeError(
            f"{name} has dtype {resets.dtype}; expected bool: {name} != 0 makes bools of numbers"
        )
    shape = tuple(x.shape[:-1])
    if resets.shape == (*shape, 1):
        return resets.reshape(shape)
    check_has_shape(name, resets, shape, f", as {of} but for its last axis")
    return resets
