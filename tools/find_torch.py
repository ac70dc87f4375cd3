#!/usr/bin/env python3
"""Prints the folder of the torch that this Python would import, without importing it."""

import importlib.util

spec = importlib.util.find_spec("torch")
print(spec.submodule_search_locations[0] if spec else "")
