"""Refuse arguments of other libraries: other keywords, and other orders of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..errors import InputError, InputTypeError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_TIMES = "t", "time"
# What to pass in place of the keywords of SciPy's solve_ivp and other solvers.
_INSTEAD = {
    "args": "params takes parameters",
    "dense_output": "t_eval takes times that steps end at",
    "dt0": "dt takes the first length",
    "events": "no events are looked for; t_eval takes times that steps end at",
    "first_step": "dt takes the first length",
    "jac": "jacobian is an argument of the simulation",
    "max_step": "max_dt takes the greatest length",
    "method": "method is an argument of TimeSteps",
    "p": "params takes parameters",
    "saveat": "t_eval takes times that steps end at",
    "step_ts": "t_eval takes times that steps end at",
    "t_span": "t0 and until take its ends",
    "y0": "u0 takes the initial state",
}


def refuse_unknown(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise an error for unknown keywords that lists the known ones."""
    known = list(known)
    for each in given:
        if each not in known:
            instead = f"; {_INSTEAD[each]}" if each in _INSTEAD else ""
            raise InputTypeError(
                f"{each} is no argument of {name}; expected some of {', '.join(known)}{instead}"
            )


def names_unknown(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a method to refuse unknown keywords by :func:`refuse_unknown`."""
    known = [each for each in inspect.signature(function).parameters if each != "self"]

    @wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        refuse_unknown(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return checked


def check_form(name: str, function: Callable[..., Any], form: tuple[str, ...]) -> None:
    """Raise if a function takes other arguments, or the time before the state."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # for a compiled function
        return
    first, second = [*signature.parameters, "", ""][:2]
    try:
        signature.bind(*form)
    except TypeError:
        is_right = False
    else:
        is_right = first not in _TIMES or second in _TIMES
    if not is_right:
        taken = ", ".join(signature.parameters)
        raise InputTypeError(f"{name} takes ({taken}); {_expected(name, form)}")


def check_order(
    name: str, function: Callable[..., Any], form: tuple[str, ...], given: tuple[Any, ...]
) -> None:
    """Raise if a function returns a state when it is called with the time first.

    It did not return one for the arguments `given`, in the right order.
    """
    if form[1] not in _TIMES:
        return
    state, time, *others = given
    try:
        is_swapped = np.shape(function(time, state, *others)) == state.shape
    except Exception:  # the function may raise anything
        return
    if is_swapped:
        raise InputError(f"{name} takes the time before the state; {_expected(name, form)}")


def _expected(name: str, form: tuple[str, ...]) -> str:
    order = ", the state before the time, unlike SciPy's order" if form[1] in _TIMES else ""
    return f"expected {name}({', '.join(form)}){order}"
