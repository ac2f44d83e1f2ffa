"""Slopes of a function along directions: differences whose steps fit, and bounds for errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .factors import Vector

_EPS = float(np.finfo(np.float64).eps)
# Steps in parts of each number: two that are always taken, and one between; shorter ones, where
# these two are apart by more than rounding; longer ones, where rounding hides a slope; those from
# 0, whose scale is not known, and around the longest of these that serves.
_FAR, _NEAR, _BETWEEN = 2.0**-5, 2.0**-18, 2.0**-11
_SHORTER = 2.0**-24, 2.0**-30, 2.0**-36, 2.0**-42
_LONGER = tuple(2.0**k for k in (-1, *range(6, 1000, 8)))
_FROM_ZERO = tuple(2.0**k for k in range(-180, 61, 24))
_AROUND = tuple(2.0**k for k in range(-30, 25, 6))
# Numbers are moved by no more than this many times the largest one. Smaller shares of that may be
# nothing but rounding: what does not move with these may move with longer steps.
_WIDEST, _SMALL = 64.0, 2.0**-40
# Units of rounding in a value.
_UNITS = 4.0
# The slopes of two steps that are apart by less than a share show how fast errors shrink, up to a
# factor.
_NEIGHBOURS, _SAFETY = 2.0**-6, 2.0
# Relative errors: of a slope that needs no other step, and of one that is told.
_WANTED, _TOLD = 1e-6, 1e-5
# What a relative change of a number does to a row is told if it is so exact beside the row itself.
_HIDDEN = 2.0**-36
# A slope is 0 if its error is larger, and below this share of the row or of slopes on both sides.
_NOTHING = 1e-8


class Slopes(NamedTuple):
    """Slopes along directions, one in each row.

    Attributes
    ----------
    values : ndarray, shape (directions, rows)
        The slopes.
    errors : ndarray, shape (directions, rows)
        Bounds for their errors, of rounding and of steps; infinite where nothing is known.
    told : ndarray of bool, shape (directions, rows)
        Whether differences tell the slopes: they converge, up to the rounding of the function.
    near : ndarray, shape (directions, rows)
        The slopes by a short step, on one side if the function has no value on the other.
    least, most : ndarray, shape (directions, rows)
        The slopes on both sides where they are apart, as at a kink; NaN elsewhere.
    """

    values: Vector
    errors: Vector
    told: NDArray[np.bool_]
    near: Vector
    least: Vector
    most: Vector

    def take(self, places: Any) -> Slopes:
        """Return those at places in rows that follow each other, direction by direction."""
        return Slopes(*(each.reshape(-1)[places] for each in self))

    def is_apart(self, found: Vector, close: Vector) -> NDArray[np.bool_]:
        """Return where other slopes are not right: apart by more, and not between both sides."""
        bound = 8 * self.errors + close
        is_between = (found >= self.least - bound) & (found <= self.most + bound)
        return ~(np.abs(found - self.values) <= bound) & ~is_between & ~np.isnan(self.values)


class _Level(NamedTuple):
    """Differences of one step on both sides."""

    step: float
    ahead: Vector
    behind: Vector

    @property
    def middle(self) -> Vector:
        """The difference over both sides."""
        return (self.ahead + self.behind) / 2

    @property
    def sides(self) -> tuple[Vector, Vector]:
        """The smaller and the larger difference of both sides; NaN if one has no value."""
        return np.minimum(self.ahead, self.behind), np.maximum(self.ahead, self.behind)

    @property
    def largest(self) -> Vector:
        """How large the larger one of both sides is, as far as they have values."""
        return np.fmax(np.abs(self.ahead), np.abs(self.behind))


def scales(x: Vector) -> Vector:
    """Return a power of two for each number, no larger than it; of 0 that of the largest one."""
    found = np.ldexp(0.5, np.frexp(np.abs(x))[1])
    is_zero = x == 0
    found[is_zero] = np.max(found[~is_zero & np.isfinite(x)], initial=0.0) or 1.0
    return np.asarray(found)


def slopes(
    function: Callable[[Vector], Vector],
    x: Vector,
    directions: Vector,
    before: Vector,
    size: Vector,
    numbers: Vector | None = None,
) -> Slopes:
    """Return the slopes of a function along directions.

    A difference of a step has an error of truncation, which is estimated by that of another step,
    and one of rounding. Two steps are taken; further ones only where these do not tell the slope. A
    row whose slopes are apart on both sides, as at a jump, has that of the side that converges.

    Parameters
    ----------
    function : callable
        A function of a vector, which may raise errors away from `x`.
    x : ndarray, shape (n,)
        Where slopes are taken.
    directions : ndarray, shape (directions, n)
        The directions, which have the scale of `x`, number by number: see :func:`scales`.
    before : ndarray, shape (rows,)
        The value at `x`.
    size : ndarray, shape (rows,)
        How large the numbers are whose sum is the value: they are rounded.
    numbers : ndarray, shape (directions, rows), optional
        Given where each row depends on one number of a direction at most: how large that is.
    """
    with np.errstate(all="ignore"):
        rounded: NDArray[np.float64] = np.ones(before.shape)
        at = _Place(function, x, before, size, rounded)
        far, near = (
            _Level(step, *np.stack([at.level(each, step)[1:] for each in directions], 1))
            for step in (_FAR, _NEAR)
        )
        if numbers is not None:
            rounded = np.where(numbers == 0, 0.0, 1.0)
            parts = rounded * np.nan_to_num(np.abs(near.middle), nan=0.0)
            at = at._replace(size=size + parts.sum(0), rounded=rounded)
        values, errors = _extrapolated(far, near, at)
        # Values that do not move at all have no slope, up to rounding.
        is_still = (far.ahead == 0) & (far.behind == 0) & (near.ahead == 0) & (near.behind == 0)
        errors[is_still] = np.broadcast_to(_EPS / _FAR * at.size, errors.shape)[is_still]
        least, most = _sides(near, at)
        is_open = ~(errors <= _WANTED * np.abs(values)) & ~is_still
        if numbers is not None:
            is_open |= is_still & (numbers > 0) & (numbers < _SMALL * np.max(np.abs(x), initial=0))
        for k in np.flatnonzero(is_open.any(1)).tolist():
            own = values[k], errors[k], least[k], most[k]
            one = at if numbers is None else at._replace(rounded=rounded[k])
            pair = [_Level(step, ahead[k], behind[k]) for step, ahead, behind in (far, near)]
            _refine(one, directions[k], pair, own, is_open[k], numbers is not None)
        is_hidden = errors <= _HIDDEN * at.size
        largest = near.largest
        for k, direction in enumerate(directions):
            zero = direction * (x == 0)
            rows = np.full(before.shape, not (direction * x).any())
            if numbers is not None:
                rows = numbers[k] == 0
            if zero.any() and rows.any():
                of_zero = values[k], errors[k], least[k], most[k], largest[k]
                _from_zero(at, zero, rows, of_zero, is_hidden[k])
        nothing = _NOTHING * np.fmax(at.size, largest)
        told = is_still | (errors <= _TOLD * np.abs(values)) | is_hidden
        told |= (np.abs(values) <= 4 * errors) & (errors <= nothing)
        one_side = np.where(np.isnan(near.ahead), near.behind, near.ahead)
        short = np.where(np.isnan(near.middle), one_side, near.middle)
    return Slopes(values, errors, told, short, least, most)


class _Place(NamedTuple):
    """Where slopes of a function are taken, its value there, and the size of what it adds.

    Each row is `rounded` by 1 if numbers that it depends on are, and by 0 if they are 0.
    """

    function: Callable[[Vector], Vector]
    x: Vector
    before: Vector
    size: Vector
    rounded: Vector

    def level(self, direction: Vector, step: float) -> _Level:
        """Return differences of one step."""
        ahead, behind = (
            tried(self.function, self.x + sign * step * direction, self.before) for sign in (1, -1)
        )
        return _Level(step, (ahead - self.before) / step, (self.before - behind) / step)

    def noise(self, level: _Level) -> Vector:
        """Return how much rounding there is in differences of a step."""
        moved = level.step * level.largest
        size = self.size + np.nan_to_num(moved, nan=0.0)
        size = size + self.rounded * np.nan_to_num(np.abs(level.middle), nan=0.0)
        return np.asarray(_UNITS * _EPS / level.step * size)


def _sides(level: _Level, at: _Place) -> tuple[Vector, Vector]:
    """Return the smaller and the larger slope of both sides, where rounding tells them apart."""
    least, most = level.sides
    least[~(most - least > 4 * at.noise(level))] = np.nan
    return least, most


def tried(function: Callable[[Any], Vector], x: Any, like: Vector) -> Vector:
    """Return the values at a place where the function may have none."""
    try:
        return function(x)
    except Exception:  # what the function raises is its own
        return np.full_like(like, np.nan)


def _extrapolated(long: _Level, short: _Level, at: _Place) -> tuple[Vector, Vector]:
    """Return the slopes that two steps lead to, whose errors shrink with the square."""
    return _limit(long.middle, short.middle, (long.step / short.step) ** 2, at.noise(short))


def _limit(long: Vector, short: Vector, ratio: float, noise: Vector) -> tuple[Vector, Vector]:
    """Return what slopes by a long and a short step lead to, if errors shrink by a ratio.

    They do where both are near each other, or the slope vanishes as fast; elsewhere the whole
    change is the error.
    """
    change = short - long
    size = np.abs(change)
    shrinks = size <= _NEIGHBOURS * np.abs(short)
    shrinks |= np.abs(short) <= _SAFETY / ratio * np.abs(long) + noise
    errors = np.where(shrinks, _SAFETY / ratio * size, size) + noise
    return short + change / (ratio - 1), np.where(np.isnan(errors), np.inf, errors)


def _refine(
    at: _Place,
    direction: Vector,
    levels: list[_Level],
    found: tuple[Vector, Vector, Vector, Vector],
    rows: NDArray[np.bool_],
    apart: bool,
) -> None:
    """Take further steps along a direction, and write slopes of rows that they tell better."""
    values, errors, least, most = found
    far, last = levels
    noise, x = at.noise(last), at.x

    def is_open() -> NDArray[np.bool_]:
        return rows & ~(errors <= _WANTED * np.abs(values))

    def take(is_better: NDArray[np.bool_], more: Vector, off: Vector, short: _Level) -> None:
        is_better = is_better & (off < errors)
        values[is_better], errors[is_better] = more[is_better], off[is_better]
        noise[is_better] = at.noise(short)[is_better]

    # Shorter steps, where the last two are apart.
    for step in _SHORTER:
        wants = is_open() & ~(errors <= 2 * noise)
        if not wants.any():
            break
        new = at.level(direction, step)
        take(wants, *_extrapolated(last, new, at), new)
        sides = _sides(new, at)
        least[wants], most[wants] = sides[0][wants], sides[1][wants]
        levels.append(new)
        last = new
    # Longer steps, where rounding hides the slope.
    last, is_in = far, np.ones(len(values), bool)
    widest = _WIDEST * np.max(np.abs(x), initial=float(np.max(np.abs(direction), initial=0.0)))
    for step in (_BETWEEN, *(_LONGER if apart else _LONGER[:1])):
        wants = is_in & is_open() & (errors <= 2 * noise)
        if not wants.any() or step * np.max(np.abs(direction)) > widest:
            break
        new = at.level(direction, step)
        long, short = (last, new) if step < last.step else (new, last)
        more, off = _extrapolated(long, short, at)
        is_in &= np.abs(more - values) <= errors + off
        take(wants & is_in, more, off, short)
        last = long
    # One side alone, where the other one jumps.
    for long, short in pairwise(levels):
        ratio = long.step / short.step
        for ends in ((long.ahead, short.ahead), (long.behind, short.behind)):
            more, off = _limit(*ends, ratio, 2 * at.noise(short))
            take(is_open() & (4 * off < errors), more, off, short)


def _from_zero(
    at: _Place,
    direction: Vector,
    rows: NDArray[np.bool_],
    found: tuple[Vector, Vector, Vector, Vector, Vector],
    is_hidden: NDArray[np.bool_],
) -> None:
    """Write slopes in numbers that are 0, by the longest step that agrees with all shorter ones.

    Other numbers do not show how far is near: a slope may be one of a place that is far away.
    """
    at = at._replace(rounded=np.zeros(len(rows)))
    first = _climb(at, direction, rows, _FROM_ZERO)
    for length in np.unique(first.length[rows]).tolist():
        steps = [length * factor for factor in _AROUND]
        own = rows & (first.length == length)
        last = _climb(at, direction, own, steps)
        own &= np.isfinite(last.slope)
        new = last.slope, last.off, last.least, last.most, first.largest
        for each, by_steps in zip(found, new, strict=True):
            each[own] = by_steps[own]
        is_short = (last.length > steps[0]) & (last.off * last.length <= _HIDDEN * at.size)
        is_hidden[own] = is_short[own]


class _Climb(NamedTuple):
    """Slopes of each row by the longest of some steps that agrees with all shorter ones.

    Attributes
    ----------
    slope, off : ndarray, shape (rows,)
        The slopes, and their errors: the rounding of those by the step before.
    length : ndarray, shape (rows,)
        The steps.
    least, most : ndarray, shape (rows,)
        The slopes on both sides where they are apart; NaN elsewhere.
    largest : ndarray, shape (rows,)
        The largest slope on one side, by steps up to the first one that does not agree.
    """

    slope: Vector
    off: Vector
    length: Vector
    least: Vector
    most: Vector
    largest: Vector


def _climb(
    at: _Place, direction: Vector, rows: NDArray[np.bool_], steps: Sequence[float]
) -> _Climb:
    """Return slopes by the longest of some steps, which grow, that agrees with all shorter ones."""
    level = at.level(direction, steps[0])
    noise, slope = at.noise(level), level.middle
    length, none = np.full(len(rows), steps[0]), np.full(len(rows), np.nan)
    found = _Climb(slope, noise + np.abs(slope), length, none, none.copy(), level.largest)
    low, high, climbs = slope - noise, slope + noise, rows
    least, most = level.sides
    least, most = least - 2 * noise, most + 2 * noise
    for step in steps[1:]:
        level, before = at.level(direction, step), noise
        noise, slope = at.noise(level), level.middle
        low, high = np.fmax(low, slope - noise), np.fmin(high, slope + noise)
        agrees = climbs & (low <= high) & ~np.isnan(slope)
        np.fmax(found.largest, level.largest, out=found.largest, where=climbs)
        climbs = agrees
        if not climbs.any():
            break
        for each, by_step in zip(found, (slope, before, np.full(len(rows), step)), strict=False):
            each[agrees] = by_step[agrees]
        # Slopes that come near each other with shorter steps, as those of curves, are not apart.
        sides = level.sides
        np.fmax(least, sides[0] - 2 * noise, out=least, where=agrees)
        np.fmin(most, sides[1] + 2 * noise, out=most, where=agrees)
    is_apart = most - least > 8 * found.off
    found.least[is_apart], found.most[is_apart] = least[is_apart], most[is_apart]
    return found
