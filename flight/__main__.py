"""`python -m flight`: see `flight.cli`."""

from flight.cli import main

if __name__ == "__main__":
    main()
