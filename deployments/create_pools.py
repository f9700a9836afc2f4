"""The work pools of deployments/pools/ on a Prefect server, created or brought up to date.

    make pools          all of them; python -m deployments.create_pools kubernetes slurm   only these

A pool is named after its file. Workers, runs and limits that a pool has stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectAlreadyExists

DIRECTORY = Path(__file__).parent / "pools"


def templates() -> dict[str, WorkPoolCreate]:
    """The pools by name."""
    return {
        path.stem: WorkPoolCreate(name=path.stem, **yaml.safe_load(path.read_text()))
        for path in sorted(DIRECTORY.glob("*.yaml"))
    }


def create(pool: WorkPoolCreate) -> str:
    """Create a pool, or give the one that is there this template; returns which of the two."""
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(pool)
        except ObjectAlreadyExists:
            kind = client.read_work_pool(pool.name).type
            if kind != pool.type:
                raise ValueError(f"pool {pool.name} is of type {kind}, not {pool.type}; delete or rename it") from None
            update = WorkPoolUpdate(description=pool.description, base_job_template=pool.base_job_template)
            client.update_work_pool(pool.name, update)
            return "updated"
    return "created"


def main() -> None:
    """Command line: create pools."""
    known = templates()
    parser = argparse.ArgumentParser(prog="python -m deployments.create_pools", description="Create work pools.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; all when none is named")
    names = parser.parse_args().names or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names:
        print(f"{create(known[name])} pool {name} ({known[name].type})")


if __name__ == "__main__":
    main()
