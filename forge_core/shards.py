"""A rollout in parts that are sampled apart, by one generator after the other or by several at once.

    {run}/rollout_shards/v0003-00-of-02/    a part: a rollout of some of its prompts
    {run}/rollouts/v0003/                   all of them, the same bytes as without parts

Every prompt has its own seed, by its place in the stream of the dataset, so who samples it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge_core.artifacts import ArtifactError
from forge_core.jobs import MergeJob, RolloutJob
from forge_core.stages.workspace import committed


def split(job: RolloutJob, num_shards: int) -> list[RolloutJob]:
    """The job in so many parts, in the order of their prompts; not more than it has prompts."""
    count = min(num_shards, job.num_prompts)
    bounds = [part * job.num_prompts // count for part in range(count + 1)]
    folder, _, name = job.output.rpartition("/rollouts/")
    return [
        job.model_copy(
            update={
                "output": f"{folder}/rollout_shards/{name}-{part:02d}-of-{count:02d}",
                "first_prompt": job.first_prompt + bounds[part],
                "num_prompts": bounds[part + 1] - bounds[part],
            }
        )
        for part in range(count)
    ]


def merge(job: RolloutJob, parts: Sequence[RolloutJob]) -> MergeJob:
    """The job that puts the committed outputs of these parts together; raises ArtifactError when one is missing."""
    refs = []
    for part in parts:
        manifest = committed(part)
        if manifest is None:
            raise ArtifactError(f"{part.output} has no manifest.json; retry the run to sample it again")
        refs.append(manifest.ref)
    return MergeJob(output=job.output, rollout=job, shards=tuple(refs))


def is_part(uri: str) -> bool:
    """Whether a rollout set is a part of another one, which has its completions too."""
    return "/rollout_shards/" in uri
