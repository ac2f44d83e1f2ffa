"""A program of PyTorch, as a user who checks types writes it."""

import torch
from typing_extensions import assert_type

from sparsescan.recurrent.catalogue import MGU
from sparsescan.torch import GRU, affine_scan, convert, linear_attention, module
from sparsescan.torch.cells import CellModule

model = torch.nn.ModuleDict({"rnn": torch.nn.GRU(12, 20), "head": torch.nn.Linear(20, 2)})
print(convert(model))
assert_type(module(MGU)(12, 20), CellModule)
assert_type(GRU(12, 20), GRU)
assert_type(affine_scan(torch.full((64,), 0.9), torch.randn(100, 16, 64)), torch.Tensor)
key = torch.zeros(1, 4, 2, 3)
assert_type(linear_attention(key, key, key), torch.Tensor)
