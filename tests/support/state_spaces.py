"""State spaces that tests draw, and a series with published results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# The annual flow of the Nile at Aswan, 1871 to 1970 (Durbin and Koopman, 2012, section 2).
NILE = np.array(
    [
        *(1120, 1160, 963, 1210, 1160, 1160, 813, 1230, 1370, 1140, 995, 935, 1110, 994, 1020, 960),
        *(1180, 799, 958, 1140, 1100, 1210, 1150, 1250, 1260, 1220, 1030, 1100, 774, 840, 874, 694),
        *(940, 833, 701, 916, 692, 1020, 1050, 969, 831, 726, 456, 824, 702, 1120, 1100, 832),
        *(764, 821, 768, 845, 864, 862, 698, 845, 744, 796, 1040, 759, 781, 865, 845, 944),
        *(984, 897, 822, 1010, 771, 676, 649, 846, 812, 742, 801, 1040, 860, 874, 848, 890),
        *(744, 749, 838, 1050, 918, 986, 797, 923, 975, 815, 1020, 906, 901, 1170, 912, 746),
        *(919, 718, 714, 740),
    ],
    float,
)


def covariances(rng: np.random.Generator, *shape: int) -> Array:
    """Return covariances that are not quite symmetric."""
    root, other = rng.standard_normal((2, *shape, shape[-1]))
    return (
        root @ root.swapaxes(-1, -2)
        + 0.3 * np.eye(shape[-1])
        + (other - other.swapaxes(-1, -2)) / 10
    )


def drawn(rng: np.random.Generator, steps: int) -> tuple[Array, dict[str, Array]]:
    """Return series and a model, whose parts steps or series may share."""
    series, states, observed = (int(rng.integers(1, n)) for n in (5, 10, 6))

    def lead() -> tuple[int, int]:
        return steps if rng.random() < 0.3 else 1, series if rng.random() < 0.3 else 1

    f = rng.standard_normal((*lead(), states, states))
    model = {
        "transition": f / np.abs(np.linalg.eigvals(f)).max(-1)[..., None, None],
        "observation": rng.standard_normal((*lead(), observed, states)),
        "transition_covariance": covariances(rng, *lead(), states),
        "observation_covariance": covariances(rng, *lead(), observed),
        "initial_covariance": covariances(rng, lead()[1], states),
    }
    more = {
        "initial_mean": (lead()[1], states),
        "transition_offset": (*lead(), states),
        "observation_offset": (*lead(), observed),
    }
    model |= {
        name: rng.standard_normal(shape) for name, shape in more.items() if rng.random() < 0.5
    }
    y = rng.standard_normal((steps, series, observed))
    y[rng.random(y.shape) < rng.choice([0, 0.1, 0.5, 1])] = np.nan
    return y, model
