"""Python imports this module when it starts, where this folder is on its path: see `programs`."""

import os
import sys

if os.environ.get("TEST_NURSERY_PYTHON") == sys.executable:
    from tests.warm import programs

    programs.install()
