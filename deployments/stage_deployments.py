"""The deployments `stage/<pool>`, by which runs send their stages to work pools (`placement` in a config).

    make stages POOLS="spot reserved"       on the server of PREFECT_API_URL; again: brought up to date

A pool must exist; `make pools` creates those of deployments/pools/. Its workers need this package in the versions of
the flow's machine, `FORGE_HOME`, and the environment that leads to the store.
"""

from __future__ import annotations

import argparse

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema

from flows.stage import stage

# As in prefect.yaml: read on the worker.
PULL = {"prefect.deployments.steps.set_working_directory": {"directory": "{{ $FORGE_HOME }}"}}


def deploy_stage(pool: str) -> None:
    """Create the deployment `stage/<pool>`, or bring it up to date; raises ValueError when there is no such pool."""
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(pool)
        except ObjectNotFound:
            raise ValueError(f"there is no work pool {pool}; create it first (`make pools`)") from None
        client.create_deployment(
            flow_id=client.create_flow(stage),
            name=pool,
            description=f"A stage of another run, in the pool {pool}.",
            entrypoint=f"{stage.fn.__module__}.{stage.fn.__name__}",
            pull_steps=[PULL],
            work_pool_name=pool,
            parameter_openapi_schema=parameter_schema(stage).model_dump_for_openapi(),
            enforce_parameter_schema=True,
            tags=["forge"],
        )


def main() -> None:
    """Command line: deployments for pools."""
    parser = argparse.ArgumentParser(
        prog="python -m deployments.stage_deployments", description="Create the deployments stage/<pool>."
    )
    parser.add_argument("pools", nargs="+", help="names of work pools")
    for pool in parser.parse_args().pools:
        deploy_stage(pool)
        print(f"deployed stage/{pool}")


if __name__ == "__main__":
    main()
