"""``python -m kvshuttle``."""

from kvshuttle.cli import main

raise SystemExit(main())
