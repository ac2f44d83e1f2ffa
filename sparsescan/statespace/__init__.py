"""Linear Gaussian state spaces: the log-likelihood of series, and its gradients.

    y_t = H_t x_t + d_t + v_t,    x_{t+1} = F_t x_t + c_t + w_t,    v_t ~ N(0, R_t), w_t ~ N(0, Q_t)

``sparsescan.torch.statespace`` and ``sparsescan.jax.statespace`` have the same functions.
"""

from .likelihood import LikelihoodGrads, log_likelihood, log_likelihood_vjp

__all__ = ["LikelihoodGrads", "log_likelihood", "log_likelihood_vjp"]
