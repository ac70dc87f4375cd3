"""Errors with the name of an argument, the value seen and the value needed."""

from transformer_engine._refusal import RefusedError, check_dropout, refuse, require

__all__ = ["RefusedError", "check_dropout", "refuse", "require"]
