"""Flow `serve`: answer requests with what a name points at, until the run is cancelled.

    python -m flows.serve deployments/configs/serve.yaml

Promotions and rollbacks are followed: the server restarts with the new version, on the same port.
"""

from __future__ import annotations

import argparse

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from forge_core.config import load_config
from forge_core.serve_config import ServeConfig
from forge_core.serving import Served, follow
from tasks.processes import Log


@flow(name="serve", flow_run_name="{config.name}", persist_result=False)
def serve(config: ServeConfig) -> None:
    """Serve a published name until the run is cancelled; fails when there is nothing left that can be served."""
    logger = get_run_logger()
    follow(config, logger, lambda served: show(config, served, logger))


def show(config: ServeConfig, served: Served, logger: Log) -> None:
    """A page in the Prefect UI: what is served, and since when. A server of Prefect's that is away costs the page."""
    published = served.publication
    page = (
        f"# {served.model}\n\n`http://{config.host}:{config.port}/v1`, model `{config.name}`\n\n"
        f"`{published.policy.uri}` of run {published.run_id}, published {published.published_at[:19]} UTC\n"
    )
    try:
        create_markdown_artifact(
            key=f"serving-{config.name.replace('_', '-')}", markdown=page, description=served.model
        )
    except Exception as error:
        logger.warning("what is served is not in the Prefect UI: %s", error)


def main() -> None:
    """Command line: serve here, until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m flows.serve", description="Serve what a name points at.")
    parser.add_argument("config", help="a YAML file, e.g. deployments/configs/serve.yaml")
    serve(load_config(parser.parse_args().config, ServeConfig))


if __name__ == "__main__":
    main()
