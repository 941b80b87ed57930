"""`python -m relaxd.cli` is `relaxd`."""

from relaxd.cli.main import main

if __name__ == "__main__":
    main()
