"""``python -m bench.train``"""

from bench.train.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
