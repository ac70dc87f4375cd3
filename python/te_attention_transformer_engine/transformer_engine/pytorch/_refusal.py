"""Errors with the name of an argument, the value seen and the value needed."""

from transformer_engine._refusal import RefusedError, refuse, require

__all__ = ["RefusedError", "refuse", "require"]
