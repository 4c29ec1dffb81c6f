"""What several modules here look at."""

import pytest

from tests.deploy.manifests import ON_RAY, OVERLAYS, Rendered, rendered


@pytest.fixture(params=[name for name in OVERLAYS if name not in ON_RAY])
def cluster(request: pytest.FixtureRequest) -> Rendered:
    """Each overlay in turn whose workers are StatefulSets."""
    return rendered(request.param)
