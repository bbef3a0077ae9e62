"""``python -m narrowboat``, which is ``narrowboat``."""

from narrowboat.cli import main

if __name__ == "__main__":
    main()
