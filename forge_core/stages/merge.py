"""Stage `merge`: the rollout sets of parts -> the rollout set that one generator would have sampled."""

from __future__ import annotations

from forge_core.artifacts import Manifest
from forge_core.jobs import MergeJob
from forge_core.rollouts import Rollouts, describe, join
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: MergeJob, workspace: Workspace) -> Manifest:
    """Put the parts together, and commit them as the output of the rollout that they are parts of."""
    watch = Stopwatch()
    with watch("load"):
        fetched = [workspace.fetch(ref) for ref in job.shards]
        manifests = [manifest for manifest, _ in fetched]
        shards = [Rollouts.load(directory) for _, directory in fetched]
    rollouts = join(shards, [_num_groups(manifest) for manifest in manifests])
    seconds = [_generate_seconds(manifest) for manifest in manifests]
    workspace.injection.reach("work")
    with workspace.directory() as directory:
        rollouts.save(directory)
        summary = describe(rollouts, sum(seconds)) | _by_shard(manifests)
        for name in ("rollout/dropped", "rollout/prompts_too_long"):
            summary[name] = sum(manifest.summary[name] for manifest in manifests)
        # The longest part stands for the whole: where there are several generators they sample at once.
        timings = watch.seconds | {"generate": max(seconds)}
        inputs = job.rollout.inputs | job.inputs
        return workspace.commit(job.rollout, directory, summary=summary, timings=timings, inputs=inputs)


def _num_groups(manifest: Manifest) -> int:
    prompts = manifest.job["num_prompts"]
    assert isinstance(prompts, int)
    return prompts - int(manifest.summary["rollout/prompts_too_long"])


def _generate_seconds(manifest: Manifest) -> float:
    """From the summary, which a part that was taken over from another run still has."""
    return manifest.summary["tokens/generated"] / manifest.summary["tokens_per_second/rollout"]


def _by_shard(manifests: list[Manifest]) -> dict[str, float | int]:
    found: dict[str, float | int] = {"shards/count": len(manifests)}
    for place, manifest in enumerate(manifests):
        found |= {
            f"shards/{place:02d}/tokens_per_second": manifest.summary["tokens_per_second/rollout"],
            f"shards/{place:02d}/load_seconds": manifest.timings.get("load", 0.0),
            f"shards/{place:02d}/upload_seconds": manifest.timings.get("upload", 0.0),
            f"shards/{place:02d}/bytes": sum(file.num_bytes for file in manifest.files),
        }
    return found
