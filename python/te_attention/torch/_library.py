"""Loads the operators: defines the schemas and loads libte_attention_torch.so."""

import torch

from te_attention.torch import _options, _schemas

LIBRARY = torch.library.Library(_schemas.NAMESPACE, "DEF")
_schemas.define(LIBRARY)
torch.ops.load_library(str(_options.PATH))
OPS = torch.ops.te_attention
