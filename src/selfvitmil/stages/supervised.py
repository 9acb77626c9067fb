"""The row of a comparison that learns from annotated lesions: a probe on embeddings, or a ResNet-18 on pixels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfvitmil.aggregate.base import BagScore, score
from selfvitmil.aggregate.supervised.base import AnnotatedSlide
from selfvitmil.aggregate.supervised.probe import save_probe, train_probe
from selfvitmil.aggregate.train import BagStore
from selfvitmil.data.sources import TrainSlide
from selfvitmil.evaluate import Cases, Run, Trial
from selfvitmil.evaluate.dataset import BagFile, Case, TrialSplit
from selfvitmil.evaluate.protocol import model_name
from selfvitmil.settings import StudySettings, tiling_name
from selfvitmil.slides import SlideRef
from selfvitmil.store.layout import StudyLayout, model_folder
from selfvitmil.store.provenance import BUILT, BuildOutcome


@dataclass(frozen=True, eq=False)
class _Learned:
    """What one training came to."""

    scores: list[BagScore]
    epoch: int
    outcome: BuildOutcome
    seconds: float
    """Of the training, be it an earlier one."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SupervisedRow:
    """Trains and scores one split with one seed, with the held-out test labels of the comparison."""

    study: Path
    settings: StudySettings
    cases: Cases
    trial: Trial
    models: Path
    store: BagStore
    report: Callable[[dict[str, Any]], None]
    """Called after every epoch of the network, with method, split and seed."""

    @property
    def method(self) -> str:
        """`resnet18` or `probe`."""
        return self.settings.compare.supervised

    @property
    def title(self) -> str:
        return {"probe": "supervised probe", "resnet18": "supervised ResNet-18"}[self.method]

    def run(self, split: TrialSplit, seed: int) -> Run:
        training = [self._annotated(case) for case in split.train]
        chosen_on = self.trial.chosen_on(split)
        validation = [self._annotated(case) for case in chosen_on]
        run_one = self._probe if self.method == "probe" else self._network
        with self.trial.labels.training(f"{self.title}, {split.name}, seed {seed}"):
            learned = run_one(split, training, validation, seed)
        by_slide = {each.slide: each for each in learned.scores}
        return Run(
            split=split.name,
            seed=seed,
            epoch=learned.epoch,
            outcome=learned.outcome,
            seconds=learned.seconds,
            warnings=learned.warnings,
            chosen_on={case.slide: by_slide[case.slide] for case in chosen_on},
            test={case.slide: by_slide[case.slide] for case in split.test},
        )

    def _probe(
        self, split: TrialSplit, training: Sequence[AnnotatedSlide], validation: Sequence[AnnotatedSlide], seed: int
    ) -> _Learned:
        learned = (*split.train, *self.trial.chosen_on(split))
        bags = {case.slide: self.trial.bag(case) for case in learned}
        begin = time.perf_counter()
        trained = train_probe(training, validation, bags, self.settings.supervised, seed)
        seconds = time.perf_counter() - begin
        folder = self._place(self.models / "probe-supervised", split, seed)
        save_probe(folder, trained, {"encoder": self.trial.encoder, "split": split.name, "seed": seed})
        wanted = self._evaluated(split)
        scored = score(trained.module, [self.trial.bag(case) for case in wanted], store=self.store)
        return _Learned(scored, 1, BUILT, seconds, trained.warnings)

    def _network(
        self, split: TrialSplit, training: Sequence[AnnotatedSlide], validation: Sequence[AnnotatedSlide], seed: int
    ) -> _Learned:
        from selfvitmil.aggregate.supervised.tile_network import score_slides, train_tile_network

        settings, where = self.settings, {"method": self.method, "split": split.name, "seed": seed}
        folder = self._place(self.models.parent / "resnet18-supervised", split, seed)
        stain, slide = settings.stain.method, settings.slide
        trained = train_tile_network(
            training, validation, folder, settings.supervised, seed,
            stain_method=stain, reader=slide.reader,
            report=lambda line: self.report({**where, **line}),
        )  # fmt: skip
        wanted = [self._slide(case) for case in self._evaluated(split)]
        scored = score_slides(trained.network, wanted, settings.supervised, stain_method=stain)
        seconds = sum(float(line["seconds"]) for line in trained.history)
        return _Learned(scored, trained.epoch, trained.outcome, seconds, trained.warnings)

    def _place(self, folder: Path, split: TrialSplit, seed: int) -> Path:
        """Folder of a model: the protocols do not overwrite each other's."""
        return model_folder(folder, model_name(split.name, self.trial.optimistic), seed)

    def _evaluated(self, split: TrialSplit) -> list[BagFile]:
        """The slides whose scores are wanted, each once."""
        return list({case.slide: case for case in (*self.trial.chosen_on(split), *split.test)}.values())

    def _table(self, slide: str) -> Path:
        return StudyLayout(self.study).tile_table(tiling_name(self.settings.tile), slide)

    def _annotated(self, case: Case) -> AnnotatedSlide:
        table = self._table(case.slide)
        row = self.cases.cohort[case.slide]
        return AnnotatedSlide.of(row, case.label, table if table.exists() else None)

    def _slide(self, case: BagFile) -> TrainSlide:
        row = self.cases.cohort[case.slide]
        return TrainSlide(SlideRef.of(row, self.settings.slide), self._table(case.slide))
