"""Read the matrices, offsets and initial state of a linear recurrence by their shapes."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..errors import InputError, InputTypeError, short
from ..symbolic.pattern import Pattern

Shape = tuple[int, ...]

# Patterns up to these sizes are kept: with their index arrays they take little memory.
_SMALL = 128
_FORMS = (
    "matrices (T, size, size) or (T, batch, size, size), diagonals (T, size) or (T, batch, size), "
    "a number for each step (T,), one matrix (size, size), one diagonal (size,) or one number for "
    "all steps, or values and their pattern"
)


class Reading(NamedTuple):
    """The meaning of the arguments of a linear recurrence.

    Attributes
    ----------
    kind : {"dense", "diagonal", "sparse"}
        The kind of matrices. Dense matrices have more than one row; sparse matrices are values on
        the caller's pattern.
    steps : int
        How many steps there are.
    batch : tuple of int
        The batch axis of the states, if there is one.
    size : int
        The length of a state.
    axes : tuple of int
        The shape of the matrices with an axis of steps, of length one if all steps share a matrix.
    is_number : bool
        Whether one number fills a diagonal; the last axis then has length 1.
    """

    kind: str
    steps: int
    batch: Shape
    size: int
    axes: Shape
    is_number: bool

    @property
    def shape(self) -> Shape:
        """The shape of the matrices, or of their values, with all entries."""
        return (*self.axes[:-1], self.size) if self.is_number else self.axes

    def pattern(self, given: Pattern | None) -> Pattern:
        """Return the pattern of the matrices: the caller's pattern if they are sparse."""
        if self.kind == "sparse" and given is not None:
            return given
        make = _kept_pattern if self.size <= _SMALL else _pattern
        return make(self.kind, self.size)


def _pattern(kind: str, size: int) -> Pattern:
    return Pattern.dense((size, size)) if kind == "dense" else Pattern.diagonal(size)


_kept_pattern = functools.lru_cache(maxsize=64)(_pattern)


class _About(NamedTuple):
    """The properties of a pattern that readings need; cached answers must not keep it alive."""

    shape: tuple[int, int]
    nnz: int
    kind: str


class _Form(NamedTuple):
    """A form that matrices of a shape may have."""

    what: str
    kind: str
    axes: Shape
    size: int
    has_steps: bool = True
    is_number: bool = False

    @property
    def batch(self) -> Shape:
        return self.axes[1 : -2 if self.kind == "dense" else -1]


def read_shapes(
    matrices: Shape,
    offsets: Shape | None,
    initial: Shape | None,
    pattern: Pattern | None,
    name: str = "offsets",
) -> Reading:
    """Return the reading of arguments of these shapes; raise if none fits, or two do.

    Parameters
    ----------
    matrices, offsets, initial : tuple of int
        The shapes of the arguments of :func:`~sparsescan.affine_scan`; None if not given.
    pattern : Pattern or None
        As there.
    name : str, default "offsets"
        The name of the offsets in errors; states, of the same shape, may replace them.

    Raises
    ------
    InputError
        If no reading fits, or if two do.
    InputTypeError
        If `pattern` is no Pattern.
    """
    if not (pattern is None or isinstance(pattern, Pattern)):
        raise InputTypeError(f"pattern is {short(pattern)}; expected a Pattern")
    about = None if pattern is None else _About(pattern.shape, pattern.nnz, pattern.kind)
    return _known(matrices, offsets, initial, about, name)


def read_shapes_anew(
    matrices: Shape,
    offsets: Shape | None,
    initial: Shape | None,
    pattern: Pattern | _About | None,
    name: str = "offsets",
) -> Reading:
    """Do :func:`read_shapes` without its cache."""
    if pattern is not None:
        _check_pattern(pattern, matrices)
    forms = _forms(matrices, pattern, _known_size(offsets, initial))
    if not forms:
        raise InputError(f"matrices has shape {matrices}; expected {_FORMS}")
    fitting = [form for form in forms if _fits(form, offsets, initial)]
    if len(fitting) > 1 and fitting[0].size > 1:
        fitting = _settled(matrices, fitting, offsets, initial)
    form = fitting[0] if fitting else forms[0]
    return _checked(form, matrices, offsets, initial, name)


_known = functools.lru_cache(maxsize=1024)(read_shapes_anew)


def _check_pattern(pattern: Pattern | _About, shape: Shape) -> None:
    if pattern.shape[0] != pattern.shape[1]:
        raise InputError(f"pattern has shape {pattern.shape}; expected a square one")
    is_whole = pattern.kind == "dense" and len(shape) in (2, 3, 4) and shape[-2:] == pattern.shape
    if not is_whole and (len(shape) not in (1, 2, 3) or shape[-1] != pattern.nnz):
        raise InputError(
            f"matrices has shape {shape}; expected (T, nnz), (T, batch, nnz) or (nnz,) with nnz = "
            f"{pattern.nnz}, as pattern says"
        )


def _known_size(offsets: Shape | None, initial: Shape | None) -> int | None:
    """Return the length of a state, if vectors determine it."""
    for shape in (offsets, initial):
        if shape:
            return shape[-1]
    return None


def _forms(shape: Shape, pattern: Pattern | _About | None, size: int | None) -> list[_Form]:
    """Return all forms that matrices of a shape may have."""
    axes = len(shape)
    is_square = axes in (2, 3, 4) and shape[-1] == shape[-2]
    if pattern is not None:
        return [_on_pattern(shape, pattern)]
    forms = [_dense(shape)] if is_square else []
    if size is not None and (axes < 2 or (axes < 4 and shape[-1] == 1 < size)):
        own = shape if axes > 1 else (*shape, 1) if axes else (1, 1)
        what = "a number for each step (T,)"
        forms.append(_Form(what, "diagonal", own, size, axes > 0, is_number=True))
    if axes in (2, 3):
        lead = "T, batch" if axes == 3 else "T"
        forms.append(_Form(f"diagonals ({lead}, size)", "diagonal", shape, shape[-1]))
    elif axes == 1:
        forms.append(_Form("one diagonal (size,)", "diagonal", (1, *shape), shape[0], False))
    return forms


def _on_pattern(shape: Shape, pattern: Pattern | _About) -> _Form:
    size, kind = pattern.shape[0], "sparse" if pattern.kind == "general" else pattern.kind
    if kind == "dense":
        if shape[-2:] == pattern.shape:
            return _dense(shape)
        shape = (*shape[:-1], size, size)  # values
    has_steps = len(shape) > (2 if kind == "dense" else 1)
    what = "matrices" if has_steps else "one matrix"
    return _Form(what, kind, shape if has_steps else (1, *shape), size, has_steps)


def _dense(shape: Shape) -> _Form:
    size, has_steps = shape[-1], len(shape) > 2
    lead = "T, batch" if len(shape) == 4 else "T"
    what = f"matrices ({lead}, size, size)" if has_steps else "one matrix (size, size)"
    axes = shape if has_steps else (1, *shape)
    if size < 2:  # it is diagonal, too
        return _Form(what, "diagonal", axes[:-1], size, has_steps)
    return _Form(what, "dense", axes, size, has_steps)


def _fits(form: _Form, offsets: Shape | None, initial: Shape | None) -> bool:
    if offsets is None and not form.has_steps:
        return False
    steps = form.axes[0] if offsets is None else offsets[0] if offsets else -1
    batches = [form.batch, (offsets or ())[1:-1], (initial or ())[:-1]]
    known = [batch for batch in batches if batch]
    return (
        form.axes[0] in (1, steps)
        and (offsets is None or (len(offsets) in (2, 3) and offsets[-1] == form.size))
        and (initial is None or (len(initial) in (1, 2) and initial[-1] == form.size))
        and all(batch == known[0] for batch in known)
    )


def _settled(
    shape: Shape, forms: list[_Form], offsets: Shape | None, initial: Shape | None
) -> list[_Form]:
    """Return the form that is meant; raise if two are possible."""
    first, second = forms[:2]
    has_samples = len(offsets or ()) == 3 or len(initial or ()) == 2
    if len(shape) == 3 and not has_samples:
        # Samples that differ in their matrices alone are rare.
        return [first]
    how = f"pattern=Pattern.dense({shape[-2:]}) or pattern=Pattern.diagonal({shape[-1]})"
    if len(shape) == 1:
        how = f"shape {(shape[0], 1)} or {(1, shape[0])}"
    raise InputError(
        f"matrices has shape {shape}, which may be {first.what} or {second.what}; expected "
        f"{how}, which says"
    )


def _checked(
    form: _Form, matrices: Shape, offsets: Shape | None, initial: Shape | None, name: str
) -> Reading:
    """Return the reading of a form; raise an error that names the argument that does not fit."""
    if offsets is None and not form.has_steps:
        raise InputError(
            f"matrices has shape {matrices}, {form.what} for all steps, and there are no offsets; "
            "expected these, one for each step, or matrices with an axis of steps"
        )
    steps = form.axes[0]
    if offsets is not None:
        if steps == 1 and offsets:
            steps = offsets[0]
        check_vectors(name, offsets, (steps,), form.size)
    if initial is not None:
        check_vectors("initial", initial, (), form.size)
    batches = {"matrices": form.batch, name: (offsets or ())[1:-1], "initial": (initial or ())[:-1]}
    batch = one_batch(**batches)
    return Reading(form.kind, steps, batch, form.size, form.axes, form.is_number)


def check_vectors(name: str, shape: Shape, lead: Shape, size: int) -> None:
    """Raise unless vectors have this size and number, with or without an axis of samples."""
    depth = len(lead)
    fits = len(shape) in (depth + 1, depth + 2)
    if not fits or (*shape[:depth], shape[-1]) != (*lead, size):
        plain = ", ".join(map(str, (*lead, size))) + ("" if lead else ",")
        with_batch = ", ".join(map(str, (*lead, "batch", size)))
        raise InputError(f"{name} has shape {shape}; expected ({plain}) or ({with_batch})")


def one_batch(**batches: Shape) -> Shape:
    """Return the batch axis of some arguments, or none; raise if two differ."""
    known = {name: batch for name, batch in batches.items() if batch}
    for name, (batch,) in known.items():
        first, (expected,) = next(iter(known.items()))
        if batch != expected:
            raise InputError(f"{name} has {batch} samples; expected {expected}, as {first} has")
    return next(iter(known.values()), ())
