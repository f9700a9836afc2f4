"""The loop of every training on a fixed dataset, with snapshots that a killed stage goes on from to the bit."""

from __future__ import annotations

import json
import logging
import re
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed

from forge_core import artifacts, listing, storage
from forge_core.artifacts import ArtifactError
from forge_core.examples import take
from forge_core.fit_progress import Progress, Validation
from forge_core.jobs import FitJob
from forge_core.stages.workspace import Workspace

logger = logging.getLogger(__name__)

PROGRESS_FILE = "progress.json"
BEST_DIRECTORY = "best"


class Course(Protocol):
    """What is learned: items in a fixed numbering, and what a step and a validation do with them."""

    content: str  # digest of the items, which with the seed decides their order

    @property
    def num_items(self) -> int:
        """How many there are."""
        ...

    def step(self, indices: list[int]) -> dict[str, float]:
        """One optimizer step on these items; its metrics."""
        ...

    def validate(self) -> tuple[float, dict[str, float]]:
        """Loss on held-out items, and what else is measured on them."""
        ...


class Trained(Protocol):
    """Weights and an optimizer, which can be kept and taken back to the bit."""

    def scale_learning_rate(self, factor: float) -> None:
        """Take the next step at `factor` times the learning rate of the schedule."""
        ...

    def save_weights(self, out_dir: Path) -> None:
        """Keep the weights alone."""
        ...

    def load_weights(self, in_dir: Path) -> None:
        """Take them back."""
        ...

    def save_train_state(self, out_dir: Path) -> None:
        """Keep weights, optimizer and step."""
        ...

    def load_train_state(self, in_dir: Path) -> None:
        """Take them back."""
        ...


@dataclass
class Fit:
    """A training that is under way in this process."""

    trainer: Trained
    job: FitJob
    course: Course
    workspace: Workspace

    def run(self) -> Progress:
        """Take all steps that are left; afterwards the trainer holds the weights to publish."""
        settings = self.job.fit
        progress = self._resume() or Progress(stop_at=settings.total_steps(self.course.num_items))
        halfway = progress.stop_at // 2
        self._validate_if_due(progress)
        while not progress.is_done:
            start, count = settings.places(progress.num_steps, self.course.num_items)
            window = take(
                self.course.num_items, start=start, count=count, seed=self.job.seed, digest=self.course.content
            )
            if progress.num_steps == halfway:
                self.workspace.injection.reach("work")
            if (factor := progress.cooling_factor(settings)) is not None:
                self.trainer.scale_learning_rate(factor)
            progress.add_step(self.course.step(window), settings)
            if progress.num_steps % 50 == 0:
                logger.info("step %d loss %.4f", progress.num_steps, progress.smoothed_loss)
            self._validate_if_due(progress)
            if progress.num_steps % settings.checkpoint_every == 0 and not progress.is_done:
                self._snapshot(progress)
        self._take_best(progress)
        self.workspace.defer(self._forget_snapshots)
        return progress

    def _validate_if_due(self, progress: Progress) -> None:
        settings = self.job.fit
        if not progress.wants_validation(settings):
            return
        loss, metrics = self.course.validate()
        logger.info("step %d validation loss %.4f", progress.num_steps, loss)
        assert settings.validation is not None
        is_best = progress.add_validation(Validation(step=progress.num_steps, loss=loss, metrics=metrics), settings)
        if is_best and settings.validation.keep == "best":
            self.trainer.save_weights(self._best_directory)

    def _take_best(self, progress: Progress) -> None:
        settings = self.job.fit.validation
        if settings is None or settings.keep == "last" or progress.best is None:
            return
        if progress.best.step < progress.num_steps:
            logger.info("the weights of step %d have the lowest validation loss and are kept", progress.best.step)
            self.trainer.load_weights(self._best_directory)

    @property
    def _best_directory(self) -> Path:
        return self.workspace.scratch / BEST_DIRECTORY  # one path for all ranks: each writes its own shards

    def _snapshot(self, progress: Progress) -> None:
        """Commit weights, optimizer and progress; of those before it, the newest stays, should this one be damaged."""
        if self.job.snapshot_output is None:
            return
        directory = self.workspace.scratch / "snapshot"
        self.trainer.save_train_state(directory)
        if self.workspace.rank == 0:
            progress.save(directory / PROGRESS_FILE)
            if self._best_directory.exists():
                shutil.copytree(self._best_directory, directory / BEST_DIRECTORY, dirs_exist_ok=True)
            earlier = self._snapshots()
            artifacts.commit(
                directory,
                f"{self.job.snapshot_output}-{self.job.digest()[:8]}-step{progress.num_steps:06d}",
                kind="train_state",
                job=self.job.as_json(),
                job_digest=self.job.digest(),
                inputs=self.job.inputs,
                summary={},
                software=self.job.software,
                timings={},
            )
            _delete(earlier[:-1])
            shutil.rmtree(directory)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def _resume(self) -> Progress | None:
        """The progress of the newest snapshot that can be read, its weights and optimizer loaded."""
        for uri in reversed(self._snapshots()):
            try:
                manifest = artifacts.read_manifest(uri)
                if manifest is None or manifest.job_digest != self.job.digest():
                    continue
                _, directory = self.workspace.fetch(manifest.ref)
            except ArtifactError as error:
                logger.warning("snapshot %s cannot be used, going further back: %s", uri, error)
                continue
            self.trainer.load_train_state(directory)
            if self.workspace.rank == 0 and (directory / BEST_DIRECTORY).exists():
                shutil.copytree(directory / BEST_DIRECTORY, self._best_directory, dirs_exist_ok=True)
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            progress = Progress.load(directory / PROGRESS_FILE)
            logger.info("going on after step %d, from %s", progress.num_steps, uri)
            self.workspace.injection.record("resume", of=uri)
            return progress
        return None

    def _snapshots(self, *, of_any_job: bool = False) -> list[str]:
        """URIs of this job's snapshots, oldest first; or also those of jobs with other settings and the same output."""
        if self.job.snapshot_output is None:
            return []
        folder, _, prefix = self.job.snapshot_output.rpartition("/")
        pattern = re.compile(rf"{prefix}-{'[0-9a-f]{8}' if of_any_job else self.job.digest()[:8]}-step[0-9]+")
        return [f"{folder}/{name}" for name in sorted(storage.list_names(folder)) if pattern.fullmatch(name)]

    def _forget_snapshots(self) -> None:
        """Delete them all: the output is committed."""
        shutil.rmtree(self._best_directory, ignore_errors=True)
        if self.workspace.rank == 0:
            _delete(self._snapshots(of_any_job=True))


def _delete(uris: list[str]) -> None:
    for uri in uris:
        listing.delete_object(f"{uri}/manifest.json")  # first: what is left of a torn deletion promises nothing
        listing.delete_below(uri)


def summarise(progress: Progress, stage: str) -> dict[str, float]:
    """The numbers of a training for its manifest, under the stage's name."""
    tail, best = progress.steps[-10:], progress.best
    numbers: dict[str, float] = {"steps": progress.num_steps}
    if progress.steps:
        numbers["loss"] = statistics.fmean(step["loss/policy"] for step in tail)
        numbers["first_loss"] = progress.steps[0]["loss/policy"]
        numbers["grad_norm"] = statistics.fmean(step["grad_norm/total"] for step in tail)
    if best is not None:
        numbers["first_validation_loss"] = progress.validations[0].loss
        numbers["last_validation_loss"] = progress.validations[-1].loss
        numbers["validation_loss"] = best.loss
        numbers["best_step"] = best.step
        numbers |= {f"validation_{name}": value for name, value in best.metrics.items()}
    return {f"{stage}/{name}": value for name, value in numbers.items()}


def history(progress: Progress) -> str:
    """One JSON line per step and per validation, for whoever draws curves."""
    validations = {validation.step: validation for validation in progress.validations}
    lines = []
    for step in range(progress.num_steps + 1):
        line: dict[str, float] = {"step": step}
        if step > 0:
            line |= progress.steps[step - 1]
        if (validation := validations.get(step)) is not None:
            line |= {"validation/loss": validation.loss}
            line |= {f"validation/{name}": value for name, value in validation.metrics.items()}
        if len(line) > 1:
            lines.append(json.dumps(line))
    return "".join(f"{line}\n" for line in lines)
