"""``python -m bench``: every op's time and memory, against plain PyTorch."""

from bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
