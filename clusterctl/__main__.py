"""``python -m clusterctl``."""

import sys

from clusterctl.main import main

sys.exit(main())
