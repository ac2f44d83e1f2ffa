"""Linear Gaussian state spaces, and linear systems of their form, with gradients.

    y_t = H_t x_t + d_t + v_t,    x_{t+1} = F_t x_t + c_t + w_t,    v_t ~ N(0, R_t), w_t ~ N(0, Q_t)

``sparsescan.torch.statespace`` and ``sparsescan.jax.statespace`` have the same functions.
"""

from ..ops.kalman import Filtered, Smoothed
from .likelihood import LikelihoodGrads, log_likelihood, log_likelihood_vjp
from .sampling import Samples, sample
from .smoothing import kalman_filter, kalman_smoother
from .solving import (
    BandedGrads,
    BlockTridiagonalGrads,
    slogdet_block_tridiagonal,
    slogdet_block_tridiagonal_vjp,
    solve_banded,
    solve_banded_vjp,
    solve_block_tridiagonal,
    solve_block_tridiagonal_vjp,
)

__all__ = [
    "BandedGrads",
    "BlockTridiagonalGrads",
    "Filtered",
    "LikelihoodGrads",
    "Samples",
    "Smoothed",
    "kalman_filter",
    "kalman_smoother",
    "log_likelihood",
    "log_likelihood_vjp",
    "sample",
    "slogdet_block_tridiagonal",
    "slogdet_block_tridiagonal_vjp",
    "solve_banded",
    "solve_banded_vjp",
    "solve_block_tridiagonal",
    "solve_block_tridiagonal_vjp",
]
