"""``python -m fedc2i`` is the command ``fedc2i``."""

from fedc2i.cli.main import main

main()
