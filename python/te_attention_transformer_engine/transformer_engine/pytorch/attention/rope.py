"""Rotary embeddings: their names, which refuse when they are used."""

from transformer_engine.pytorch._layers import function, layer

RotaryPositionEmbedding = layer("RotaryPositionEmbedding")
apply_rotary_pos_emb = function("apply_rotary_pos_emb")
