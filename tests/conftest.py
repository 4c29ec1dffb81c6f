"""Settings that all tests share."""

from hypothesis import settings

# How long an example takes depends on who else uses the machine; what must not take long is measured in `bench/`.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")
