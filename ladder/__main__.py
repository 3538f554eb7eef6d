"""`python -m ladder` is the command `ladder`."""

from ladder.cli import main

if __name__ == "__main__":
    main()
