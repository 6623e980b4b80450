"""`python -m rankwise` is the same command as `rankwise`."""

from rankwise.cli import main

if __name__ == "__main__":
    main(prog_name="rankwise")
