"""``python -m narrowboat`` is ``narrowboat``."""

from narrowboat.cli import main

main()
