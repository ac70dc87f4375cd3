"""Eight devices of the host, which a process must ask for before JAX starts."""

import os

DEVICES = 8
FLAG = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
