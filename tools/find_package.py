#!/usr/bin/env python3
"""Prints the folder of the package that this Python would import, without importing it."""

import importlib.util
import sys

spec = importlib.util.find_spec(sys.argv[1])
print(spec.submodule_search_locations[0] if spec else "")
