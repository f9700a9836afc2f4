"""python -m deployments.cli, the same as the command `forge`."""

from deployments.cli.app import main

main()
