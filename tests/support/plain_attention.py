"""Linear attention by its definition, step by step, for any dtype that autograd takes."""

from __future__ import annotations

import torch
from torch import Tensor


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    bonus: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and last states."""
    (batch, steps, heads, keys), out = q.shape, []
    state = q.new_zeros(batch, heads, keys, v.shape[3]) if initial_state is None else initial_state
    for t in range(steps):
        before, added = state, torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        if decay is not None:
            w = decay[:, min(t, decay.shape[1] - 1)]
            state = (w if w.dim() == 3 else w[..., None])[..., None] * state
        if a is not None and b is not None:
            state = state + torch.einsum("bhi,bhj,bhjv->bhiv", b[:, t], a[:, t], before)
        state = state + added
        seen = state if bonus is None else before + bonus[..., None] * added
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], seen))
    return torch.stack(out, 1) if out else torch.zeros_like(v), state
