"""`python -m headprune`: the command line, for launchers that start modules."""

from headprune.cli.main import main

if __name__ == "__main__":
    main()
