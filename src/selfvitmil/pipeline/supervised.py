"""The row of a comparison that learns from outlined lesions: a probe on vectors, or a ResNet-18 on pixels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfvitmil.aggregate.scoring import BagScore, score
from selfvitmil.aggregate.supervised import (
    AnnotatedSlide,
    save_probe,
    score_slides,
    train_probe,
    train_tile_network,
)
from selfvitmil.aggregate.train import BagStore
from selfvitmil.evaluate import Cases, Run, Trial
from selfvitmil.evaluate.cases import BagFile, Case
from selfvitmil.evaluate.trial import TrialSplit
from selfvitmil.pretrain.sources import TrainSlide
from selfvitmil.settings import StudySettings, tiling_name


@dataclass(frozen=True, eq=False)
class SupervisedRow:
    """Trains and scores one split with one seed, under the seal of the comparison."""

    study: Path
    settings: StudySettings
    cases: Cases
    trial: Trial
    models: Path
    store: BagStore

    @property
    def method(self) -> str:
        """`resnet18` or `probe`."""
        return self.settings.compare.supervised

    @property
    def title(self) -> str:
        return {"probe": "supervised probe", "resnet18": "supervised ResNet-18"}[self.method]

    def run(self, split: TrialSplit, seed: int) -> Run:
        begin = time.perf_counter()
        training = [self._annotated(case) for case in split.train]
        chosen_on = self.trial.chosen_on(split)
        validation = [self._annotated(case) for case in chosen_on]
        run_one = self._probe if self.method == "probe" else self._network
        with self.trial.labels.training(f"{self.title}, {split.name}, seed {seed}"):
            scored, epoch, note, warnings = run_one(split, training, validation, seed)
        by_slide = {each.slide: each for each in scored}
        return Run(
            split=split.name,
            seed=seed,
            epoch=epoch,
            note=note,
            seconds=time.perf_counter() - begin,
            warnings=warnings,
            chosen_on={case.slide: by_slide[case.slide] for case in chosen_on},
            test={case.slide: by_slide[case.slide] for case in split.test},
        )

    def _probe(
        self, split: TrialSplit, training: Sequence[AnnotatedSlide], validation: Sequence[AnnotatedSlide], seed: int
    ) -> tuple[list[BagScore], int, str, tuple[str, ...]]:
        learned = (*split.train, *self.trial.chosen_on(split))
        bags = {case.slide: self.trial.bag(case) for case in learned}
        trained = train_probe(training, validation, bags, self.settings.supervised, seed)
        folder = self.models / "probe-supervised" / split.name / f"seed{seed}"
        save_probe(folder, trained, {"encoder": self.trial.encoder, "split": split.name, "seed": seed})
        wanted = self._judged(split)
        scored = score(trained.module, [self.trial.bag(case) for case in wanted], store=self.store)
        return scored, 1, "made", trained.warnings

    def _network(
        self, split: TrialSplit, training: Sequence[AnnotatedSlide], validation: Sequence[AnnotatedSlide], seed: int
    ) -> tuple[list[BagScore], int, str, tuple[str, ...]]:
        settings = self.settings
        folder = self.models.parent / "resnet18-supervised" / split.name / f"seed{seed}"
        stain, slide = settings.stain.method, settings.slide
        trained = train_tile_network(
            training, validation, folder, settings.supervised, seed,
            stain_method=stain, reader=slide.reader, slide_mpp=slide.mpp,
        )  # fmt: skip
        wanted = [self._slide(case) for case in self._judged(split)]
        scored = score_slides(
            trained.network, wanted, settings.supervised, stain_method=stain, reader=slide.reader, slide_mpp=slide.mpp
        )
        return scored, trained.epoch, trained.note, trained.warnings

    def _judged(self, split: TrialSplit) -> list[BagFile]:
        """The slides whose scores are wanted, each once."""
        return list({case.slide: case for case in (*self.trial.chosen_on(split), *split.test)}.values())

    def _table(self, slide: str) -> Path:
        return self.study / "tiles" / tiling_name(self.settings.tile) / f"{slide}.h5"

    def _annotated(self, case: Case) -> AnnotatedSlide:
        table = self._table(case.slide)
        row = self.cases.cohort[case.slide]
        return AnnotatedSlide.of(row, case.label, table if table.exists() else None)

    def _slide(self, case: BagFile) -> TrainSlide:
        row = self.cases.cohort[case.slide]
        return TrainSlide(row.slide, row.path, self._table(case.slide), row.mpp)
