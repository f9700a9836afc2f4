"""Stage `dataset`: a dataset function -> examples.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from forge_core.artifacts import Manifest
from forge_core.examples import Example, write_examples
from forge_core.functions import load_function
from forge_core.jobs import DatasetJob
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: DatasetJob, workspace: Workspace) -> Manifest:
    """Materialise the dataset; raises ValueError when it is empty or an example is malformed."""
    watch = Stopwatch()
    with workspace.directory() as directory:
        with watch("dataset"):
            sources: Counter[str] = Counter()
            examples = _counted(load_function(job.dataset, "dataset")(), sources)
            count = write_examples(examples, directory / "examples.jsonl")
        workspace.injection.reach("work")
        if count == 0:
            raise ValueError(f"dataset {job.dataset.fn} with {job.dataset.kwargs} yields no examples")
        summary = {"dataset/examples": count} | {f"dataset/from/{name}": sources[name] for name in sorted(sources)}
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def _counted(examples: Iterable[Example], sources: Counter[str]) -> Iterator[Example]:
    """The examples, counted by their `metadata.source` if they have one (those of a mixture do)."""
    for example in examples:
        if "source" in example.metadata:
            sources[str(example.metadata["source"])] += 1
        yield example
