"""The command `plait`, and `python -m plait`, which is the same under torchrun."""

from plait.cli.program import run_program


def main() -> None:
    """Run the command line."""
    run_program(_run)


def _run() -> None:
    from plait.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
