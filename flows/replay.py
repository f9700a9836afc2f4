"""Flow `replay`: verify a run by recomputing every update from its stored rollouts and comparing the digests.

python -m flows.replay RUN_URI
"""

from __future__ import annotations

import argparse
import tempfile

from prefect import flow
from prefect.artifacts import create_table_artifact

from forge_core.again import ReplayConfig, redo_job, updates_of, version_of
from forge_core.artifacts import ArtifactError, Ref, resolve
from forge_core.config import RunConfig
from forge_core.jobs import UpdateJob
from forge_core.operation import WarmthConfig
from tasks import stages
from tasks.run import open_run


@flow(name="replay", flow_run_name="replay", persist_result=False)
def replay(config: ReplayConfig) -> list[dict[str, str | bool]]:
    """A row for each update, saying whether it gave the same digest; raises ArtifactError when one did not.

    What is recomputed lies in a temporary directory of the machine that runs this.
    """
    published = updates_of(config.run)
    rows: list[dict[str, str | bool]] = []
    with tempfile.TemporaryDirectory(prefix="forge-replay-") as root:
        settings = RunConfig(
            name="replay",
            root=root,
            evals=(),
            trainer=UpdateJob.model_validate(published[0].job).trainer,
            keep_warm=WarmthConfig(generator=False, scorer=False),
        )
        with open_run(settings, None) as run:
            remade: dict[str, Ref] = {}  # by digest: retention may have taken the files of the published ones
            for manifest in published:
                job = redo_job(manifest, run.plan.run_uri)
                job = job.model_copy(update={"policy": remade.get(job.policy.digest, job.policy)})
                again = resolve(stages.update(job))
                remade[again.digest] = again.ref
                is_equal = again.digest == manifest.digest
                rows.append({"policy": version_of(manifest), "digest": manifest.digest, "is equal": is_equal})
                run.logger.info(
                    "%s %s", version_of(manifest), "is the same" if is_equal else f"DIFFERS: {again.digest}"
                )
    create_table_artifact(key="replayed", description=f"Updates of {config.run}, recomputed", table=rows)
    if wrong := [str(row["policy"]) for row in rows if not row["is equal"]]:
        raise ArtifactError(f"{', '.join(wrong)} of {config.run} differ from what their rollouts give on this machine")
    return rows


def main() -> None:
    """Command line: verify a run."""
    parser = argparse.ArgumentParser(prog="python -m flows.replay", description="Recompute a run's updates.")
    parser.add_argument("run", help="URI of the run, {root}/{run_id}")
    replay(ReplayConfig(run=parser.parse_args().run))


if __name__ == "__main__":
    main()
