"""The command `plait`, and `python -m plait`, which is the same under torchrun."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it in one line, also while modules are still being imported."""
    try:
        from plait.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
