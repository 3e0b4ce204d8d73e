"""Settings of all tests."""

import os

from hypothesis import settings

# A change must not fail for what chance finds in another part; by hand, chance may look.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
