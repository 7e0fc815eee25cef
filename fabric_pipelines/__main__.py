"""Where `fabric` and `python -m fabric_pipelines` start: the answer to Ctrl-C first, then everything that takes time."""

from fabric_pipelines.interrupts import CTRL_C


def main() -> None:
    CTRL_C.install()
    from fabric_pipelines import cli

    cli.main()


if __name__ == "__main__":
    main()
