"""Stage `start`: build or import the starting policy as v0000."""

from __future__ import annotations

import shutil

from forge_core.artifacts import Manifest
from forge_core.holds import hold
from forge_core.jobs import StartJob
from forge_core.manifests import root_of
from forge_core.policies import import_policy
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: StartJob, workspace: Workspace) -> Manifest:
    """Bring the policy into Hugging Face layout and commit it."""
    watch = Stopwatch()
    with workspace.directory() as directory, workspace.directory() as scratch:
        with watch("start"):
            if job.source is not None:
                with hold(root_of(job.source.uri), job.source, f"start of {job.output}"):
                    _, source_dir = workspace.fetch(job.source)
                    shutil.copytree(source_dir, directory, dirs_exist_ok=True)
            else:
                import_policy(job.policy, directory, seed=job.seed, scratch=scratch)
        workspace.injection.reach("work")
        num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        return workspace.commit(job, directory, summary={"policy/num_bytes": num_bytes}, timings=watch.seconds)
