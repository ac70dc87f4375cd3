"""The attention layer with projections: its name, which refuses when one is created."""

from transformer_engine.pytorch._layers import layer

MultiheadAttention = layer("MultiheadAttention")
