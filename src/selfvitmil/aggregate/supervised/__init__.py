"""The fully supervised baseline: a classifier of tiles learns from outlined lesions and scores slides by their tiles.

It answers what slide labels alone cost. Two forms: `probe`, a logistic regression on the frozen vectors of an encoder,
and `tilenet` (trained by `tiletrain`), a ResNet-18 on the pixels of tiles. In both, `labels` says which tiles are
tumour, which are normal and which are left out; every choice (strength of the penalty, epoch) is made on tiles of
validation slides; `scores` turns the probabilities of a slide's tiles into one. Of the published row (DSMIL's table,
accuracy 0.9147 and AUC 0.9362 on Camelyon16) neither the overlap that makes a tile tumour nor the pooling is known, so
both can be set (`SupervisedSettings`).

    trained = train_probe(training, validation, bags, settings, seed)
    scores = score(trained.module, test_bags)      # selfvitmil.aggregate.train

    trained = train_tile_network(training, validation, folder, settings, seed, stain_method="slide")
    scores = score_slides(trained.network, test_slides, settings, stain_method="slide")
"""

from __future__ import annotations

from selfvitmil.aggregate.supervised.labels import AnnotatedSlide, label_slides
from selfvitmil.aggregate.supervised.probe import TileProbe, TrainedProbe, save_probe, train_probe
from selfvitmil.aggregate.supervised.tilenet import TileNetwork, load_tile_network, score_slides, tile_probabilities
from selfvitmil.aggregate.supervised.tiletrain import TrainedNetwork, train_tile_network

__all__ = [
    "AnnotatedSlide",
    "TileNetwork",
    "TileProbe",
    "TrainedNetwork",
    "TrainedProbe",
    "label_slides",
    "load_tile_network",
    "save_probe",
    "score_slides",
    "tile_probabilities",
    "train_probe",
    "train_tile_network",
]
