"""Settings that all tests share."""

import os
from pathlib import Path

from hypothesis import settings

# How long an example takes depends on who else uses the machine; what must not take long is measured in `bench/`.
# The default suite says the same each time of the same code; `make test-slow` looks elsewhere each time.
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeat")

if not Path("/dev/nvidiactl").exists():
    # Without a GPU Triton's kernels are interpreted. Triton reads this when it is imported, which transformers does too.
    os.environ["TRITON_INTERPRET"] = "1"
