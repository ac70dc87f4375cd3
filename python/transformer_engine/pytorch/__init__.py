"""TransformerEngine's attention for PyTorch."""

import transformer_engine_torch  # noqa: F401  (callers rely on it being loaded)
