"""How results of PyTorch's front door are compared with what PyTorch's own operations give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def tensors_of(results: Any) -> list[Any]:
    """Return all tensors that carry gradients, and what is None, in order."""
    if isinstance(results, PackedSequence):
        return [results.data]
    if not isinstance(results, Mapping | tuple | list):
        return [results]
    parts = results.values() if isinstance(results, Mapping) else results
    return [each for part in parts for each in tensors_of(part)]


def close(actual: Any, expected: Any, terms: float = 1.0, *, factor: float = 1e4) -> None:
    """Check that tensors agree but for rounding of what is summed up, if that is up to `terms`."""
    pairs = zip(tensors_of(actual), tensors_of(expected), strict=True)
    for k, (one, right) in enumerate(pairs):
        assert (one is None) == (right is None), k
        if one is None:
            continue
        other = torch.as_tensor(right)
        assert one.shape == other.shape, k
        assert one.dtype == other.dtype, k
        is_whole = not (other.is_floating_point() or other.is_complex())
        eps = 0 if is_whole else torch.finfo(other.dtype).eps
        if one.numel():
            apart, largest = (float(x.detach().abs().max()) for x in (one - other, other))
            assert apart <= factor * eps * max(terms, largest), (k, apart)


def check_compiled(
    loss: Callable[..., Tensor], given: Sequence[Any], leaves: Sequence[Tensor], **options: Any
) -> None:
    """Check that a function has one graph, without a break, which gives its own results.

    PyTorch breaks it at recurrent modules if `allow_rnn` is not set.
    """
    torch._dynamo.reset()  # else many forms of one function are too many
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", **options)
    compiled = torch._dynamo.config.patch(allow_rnn=True)(compiled)
    for _ in range(2):
        results = []
        for call in (loss, compiled):
            value = call(*given)
            results.append([value, *torch.autograd.grad(value, leaves)])
        torch.testing.assert_close(*results)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), loss(*given))
