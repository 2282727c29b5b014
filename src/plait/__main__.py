"""`python -m plait` is the command `plait`, also under torchrun."""

from plait.cli.main import main

if __name__ == "__main__":
    main()
