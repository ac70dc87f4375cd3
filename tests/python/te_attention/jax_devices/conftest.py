"""Eight devices of the host, which a process must ask for before JAX starts.

Most of the time is compilation: LLVM need not optimise programs that run once.
"""

import os

DEVICES = 8
FLAGS = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
