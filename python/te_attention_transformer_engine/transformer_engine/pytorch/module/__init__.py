"""Modules; here only the base class of attention."""
