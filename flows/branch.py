"""Flow `branch`: a new run from a policy version of another one, with some settings changed.

python -m flows.branch RUN_URI 3 grpo.optimizer.learning_rate=1e-5 [--run-id ID]
"""

from __future__ import annotations

import argparse

import yaml
from prefect import flow

from flows.post_train import post_train
from forge_core.again import BranchConfig, branched


@flow(name="branch", flow_run_name="branch-v{config.version}", persist_result=False)
def branch(config: BranchConfig, run_id: str | None = None) -> dict[str, float | int]:
    """Post-train from a stored policy version; lineage goes on into the run it came from."""
    return post_train.fn(branched(config), run_id=run_id)


def main() -> None:
    """Command line: branch from a run."""
    parser = argparse.ArgumentParser(prog="python -m flows.branch", description="Branch a run from a policy version.")
    parser.add_argument("run", help="URI of the run, {root}/{run_id}")
    parser.add_argument("version", type=int, help="policy version to start from")
    parser.add_argument("changes", nargs="*", help="settings that differ, name=value")
    parser.add_argument("--run-id", help="name of the new run")
    arguments = parser.parse_args()
    changes = {
        name: yaml.safe_load(value) for name, _, value in (change.partition("=") for change in arguments.changes)
    }
    branch(BranchConfig(run=arguments.run, version=arguments.version, changes=changes), run_id=arguments.run_id)


if __name__ == "__main__":
    main()
