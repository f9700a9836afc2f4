"""Stage `dataset`: a dataset function -> examples.jsonl."""

from __future__ import annotations

from forge_core.artifacts import Manifest
from forge_core.examples import write_examples
from forge_core.functions import load_function
from forge_core.jobs import DatasetJob
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: DatasetJob, workspace: Workspace) -> Manifest:
    """Materialise the dataset; raises ValueError when it is empty or an example is malformed."""
    watch = Stopwatch()
    with workspace.directory() as directory:
        with watch("dataset"):
            count = write_examples(load_function(job.dataset, "dataset")(), directory / "examples.jsonl")
        workspace.injection.reach("work")
        if count == 0:
            raise ValueError(f"dataset {job.dataset.fn} with {job.dataset.kwargs} yields no examples")
        return workspace.commit(job, directory, summary={"dataset/examples": count}, timings=watch.seconds)
