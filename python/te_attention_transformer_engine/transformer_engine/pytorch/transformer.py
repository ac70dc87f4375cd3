"""The whole transformer layer: its name, which refuses when one is created."""

from transformer_engine.pytorch._layers import TransformerLayer

__all__ = ["TransformerLayer"]
