"""`python -m gateway ...` is `penstock ...`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
